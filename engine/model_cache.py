"""Where fetched and converted models live, and how a folder appears there whole or not at all.

    models/.NAME.lock      flock, one builder at a time; the kernel frees it when its holder dies
    models/.NAME.partial/  work area on the same disk; swept by the next builder after a kill
    models/NAME/           renamed from the work area; disagg_source.json says where it came from

An interrupt, a full disk or a second process therefore never shows anybody half a model.
"""

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.cache_folder import cache_folder

SOURCE_FILE = "disagg_source.json"

# stage, done_bytes, total_bytes; total_bytes is 0 where the size is not known.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a folder's weights came from. `weights` says what that did to them, for people."""

    kind: str
    origin: str
    digest: str
    weights: str


class FetchFailed(ValueError):
    """A model could not be had from `origin`; `reason` is one line."""

    def __init__(self, origin: str, reason: str) -> None:
        super().__init__(f"{origin}: {reason}")
        self.origin = origin
        self.reason = reason


def models_folder() -> Path:
    """$DISAGG_CACHE/models, else $XDG_CACHE_HOME/disagg/models, else ~/.cache/disagg/models."""
    return cache_folder() / "models"


def read_source(folder: Path) -> ModelSource | None:
    """Where a cached folder came from; None for a folder that disagg did not make."""
    path = folder / SOURCE_FILE
    if not path.is_file():
        return None
    return ModelSource(**json.loads(path.read_text(encoding="utf-8")))


def is_cached(folder: Path) -> bool:
    return (folder / SOURCE_FILE).is_file()


def build_once(folder: Path, *, build: Callable[[Path], ModelSource], progress: Progress) -> Path:
    """The folder, filled by `build` unless it is there already.

    `build` fills the folder that it is given and may leave anything beside it: the parent is a
    work area that is deleted afterwards. Whatever it raises leaves nothing behind; a full disk and
    the like raise FetchFailed.
    """
    if is_cached(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock"), progress=progress):
            if not is_cached(folder):
                _build(folder, build=build)
    except OSError as error:
        raise FetchFailed(str(folder), error.strerror or str(error)) from error
    return folder


def _build(folder: Path, *, build: Callable[[Path], ModelSource]) -> None:
    with _work_area(folder.with_name(f".{folder.name}.partial")) as area:
        made = area / "model"
        made.mkdir()
        source = build(made)
        text = json.dumps(asdict(source), indent=2)
        (made / SOURCE_FILE).write_text(text + "\n", encoding="utf-8")
        _flush(made)
        # Only something that is no finished model can be in the way.
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)


@contextmanager
def _locked(path: Path, *, progress: Progress) -> Iterator[None]:
    # The file stays: deleting it would let two processes lock two files of the same name.
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares this model", 0, 0)
            # Bounded by the holder's own deadlines: every step of a build has one.
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _work_area(partial: Path) -> Iterator[Path]:
    shutil.rmtree(partial, ignore_errors=True)
    # A new name each time: a child of a killed builder may still be writing to the old one.
    area = partial / uuid.uuid4().hex
    area.mkdir(parents=True)
    try:
        yield area
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(folder: Path) -> None:
    """To the disk, so that a power cut cannot leave the name of a model with empty files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
