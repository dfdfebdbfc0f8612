"""The kernels are compiled once, never from a stale source; their absence is said in words."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.cpu.build import BuildFailed, build_library
from kernels.cpu.library import Runner, load_library

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@needs_compiler
def test_a_second_build_finds_the_first_and_a_changed_source_does_not(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is not run; the compiler's optimiser takes most of the time.
    monkeypatch.setenv("DISAGG_CPU_FLAGS", "-O0")
    first = build_library()
    modified = first.stat().st_mtime_ns
    assert build_library() == first
    assert first.stat().st_mtime_ns == modified
    assert list(empty_cache.iterdir()) == [first], "nothing else is left"
    sources = tmp_path / "sources"
    shutil.copytree(build._SOURCES, sources)
    with (sources / "api.h").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(build, "_SOURCES", sources)
    assert build_library() != first


@pytest.mark.slow
@needs_compiler
def test_two_builders_at_a_time_leave_one_library(empty_cache: Path) -> None:
    command = [sys.executable, "-c", "from kernels.cpu.library import load_library; load_library()"]
    builders = [subprocess.Popen(command, env={**os.environ}) for _ in range(2)]
    assert [builder.wait(timeout=100) for builder in builders] == [0, 0]
    assert [path.suffix for path in empty_cache.iterdir()] == [".so"]


def test_no_compiler_is_said_in_one_line(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildFailed, match=r"^no C\+\+ compiler \(no-such-compiler\)$"):
        build_library()


@needs_compiler
def test_a_failing_compiler_is_quoted_and_leaves_nothing(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_CPU_FLAGS", "-DPANEL=x")
    with pytest.raises(BuildFailed, match="error"):
        build_library()
    assert not list(empty_cache.iterdir())


@needs_compiler
def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildFailed, match="file/kernels: "):
        build_library()


@needs_compiler
def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="this CPU cannot run 'neon'"):
        Runner(load_library(), isa="neon")


def thread_states() -> dict[str, str]:
    """This process's threads and what the kernel says of each: R runs or could, S sleeps."""
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: (task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


@needs_compiler
def test_idle_threads_sleep() -> None:
    """A thread that waits for work by spinning or yielding would be R for ever."""
    before = thread_states()
    with Runner(load_library(), num_threads=4):
        helpers = thread_states().keys() - before.keys()
        assert len(helpers) == 3
        while {thread_states()[helper] for helper in helpers} != {"S"}:
            os.sched_yield()
