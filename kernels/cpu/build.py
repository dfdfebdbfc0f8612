"""Compiles the C++ kernels once per machine: seconds, then a file in the user's cache.

    kernels/cpu-KEY.so    KEY hashes the sources, the flags and the compiler's version

So a changed source never meets an old library, and one cache may serve several machines: every
instruction set is compiled in, and the library picks when it is loaded. The file appears by
rename; two builders at a time do the work twice and leave the same file. Nothing is built at
import. DISAGG_CPU_FLAGS adds flags (a sanitizer), CXX names the compiler.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.cache_folder import cache_folder

_SOURCES = Path(__file__).parent
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-Wall", "-Wextra"),
    # GCC 12 takes the undefined upper half inside its own intrinsics for a mistake of ours.
    *("-Wno-missing-field-initializers", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
)
_AVX512 = ("-march=x86-64-v4", "-mavx512bf16")
# The flags of unit.cpp, once per instruction set.
_UNITS = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16"),
}
_COMPILE_TIMEOUT_S = 120.0


class BuildFailed(Exception):
    """The kernels could not be compiled here; the message is one line."""


def build_library() -> Path:
    """Path of the compiled kernels, built if the cache has none. Raises BuildFailed."""
    compiler = _compiler()
    flags = (*_FLAGS, *shlex.split(os.environ.get("DISAGG_CPU_FLAGS", "")))
    library = cache_folder() / "kernels" / f"cpu-{_key(compiler, flags)}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as folder:
            built = _build(compiler, flags, Path(folder))
            os.replace(built, library)
    except OSError as error:
        raise BuildFailed(f"{library.parent}: {error.strerror or error}") from error
    return library


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return path
    raise BuildFailed(f"no C++ compiler ({named or 'g++'})")


def _units() -> dict[str, tuple[str, ...]]:
    return _UNITS if platform.machine() == "x86_64" else {"plain": ()}


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = _run([compiler, "--version"])
    digest = hashlib.sha256(repr((version, flags, _units())).encode())
    for path in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: str, flags: tuple[str, ...], folder: Path) -> Path:
    commands = [
        [
            *(compiler, *flags, *unit_flags, f"-DUNIT={unit}"),
            *("-c", str(_SOURCES / "unit.cpp"), "-o", str(folder / f"{unit}.o")),
        ]
        for unit, unit_flags in _units().items()
    ]
    for name in ("entry", "team", "workspace"):
        source, target = _SOURCES / f"{name}.cpp", folder / f"{name}.o"
        commands.append([compiler, *flags, "-c", str(source), "-o", str(target)])
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    library = folder / "cpu.so"
    objects = [str(path) for path in sorted(folder.glob("*.o"))]
    _run([compiler, *flags, "-shared", *objects, "-o", str(library), "-lpthread"])
    return library


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["failed"]
        raise BuildFailed(f"{command[0]}: {lines[0]}")
    return done.stdout
