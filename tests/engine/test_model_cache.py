"""A folder is in the cache whole or not at all, whatever happens to whoever builds it."""

import errno
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from engine.model_cache import (
    FetchFailed,
    ModelSource,
    build_once,
    is_cached,
    models_folder,
    read_source,
)

_SOURCE = ModelSource(kind="test", origin="here", digest="d", weights="none")
_ROOT = Path(__file__).parents[2]


def _silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    pass


def _build(made: Path) -> ModelSource:
    (made / "config.json").write_text("{}")
    return _SOURCE


def test_folder_says_where_it_came_from(tmp_path: Path) -> None:
    folder = build_once(tmp_path / "models" / "m", build=_build, progress=_silent)
    assert read_source(folder) == _SOURCE
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "disagg_source.json"]


def test_a_folder_of_the_users_own_has_no_source(tmp_path: Path) -> None:
    assert read_source(tmp_path) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bad"), FetchFailed("m", "x")])
def test_a_build_that_raises_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def build(made: Path) -> ModelSource:
        _build(made)
        raise error

    with pytest.raises(type(error)):
        build_once(tmp_path / "m", build=build, progress=_silent)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    def build(made: Path) -> ModelSource:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(FetchFailed, match=r"/m: No space left on device$"):
        build_once(tmp_path / "m", build=build, progress=_silent)


def test_a_killed_builder_blocks_nobody_and_its_rest_is_swept(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from engine.model_cache import build_once\n"
        "def build(made):\n"
        "    (made / 'config.json').write_text('{')\n"
        "    print('building', flush=True); sys.stdin.read()\n"
        f"build_once(Path({str(tmp_path / 'm')!r}), build=build, progress=lambda *_: None)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"building\n"
        builder.kill()
    assert (tmp_path / ".m.partial").exists()
    assert not is_cached(tmp_path / "m")
    folder = build_once(tmp_path / "m", build=_build, progress=_silent)
    assert (folder / "config.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]


def test_a_folder_without_a_source_is_no_finished_model_and_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "half.safetensors").write_text("")
    folder = build_once(tmp_path / "m", build=_build, progress=_silent)
    assert not (folder / "half.safetensors").exists()


def test_builders_at_the_same_time_build_once(tmp_path: Path) -> None:
    built: list[Path] = []
    start = Barrier(5)

    def build(made: Path) -> ModelSource:
        built.append(made)
        return _build(made)

    def builder(_: int) -> Path:
        start.wait(timeout=10)
        return build_once(tmp_path / "m", build=build, progress=_silent)

    with ThreadPoolExecutor(5) as pool:
        folders = set(pool.map(builder, range(5)))
    assert folders == {tmp_path / "m"}
    assert len(built) == 1


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISAGG_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models_folder() == Path.home() / ".cache" / "disagg" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models_folder() == tmp_path / "xdg" / "disagg" / "models"
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "own"))
    assert models_folder() == tmp_path / "own" / "models"
