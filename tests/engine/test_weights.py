"""Checkpoints: whole ones load however they are split, damaged ones fail in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import model_digest
from engine.model import load_model
from tests.models import make_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "llama")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of the single file; None removes one, dots are written as __."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")


def split_into_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for shard in range(2):
        file_name = f"model-{shard + 1:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[shard::2]}
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_shards_load_as_the_single_file_does(folder: Path) -> None:
    whole = load_model(folder, dtype="float32")._weights
    split_into_shards(folder)
    shards = load_model(folder, dtype="float32")._weights
    assert torch.equal(whole.embedding_VE, shards.embedding_VE)
    x = torch.eye(whole.layers[1].qkv.in_features)
    assert torch.equal(whole.layers[1].qkv(x), shards.layers[1].qkv(x))


def test_progress_grows_to_the_end(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(folder, dtype="float32", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == seen[0][1]


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_any_float_checkpoint_is_converted(tmp_path: Path, stored: torch.dtype) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama", dtype=stored)
    assert load_model(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_an_absent_folder_and_an_empty_one_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        load_model(tmp_path / "nowhere", dtype="float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors nor"):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_one_line(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    for read in (lambda: load_model(folder, dtype="float32"), lambda: model_digest(folder)):
        with pytest.raises(ValueError, match=r"model\.safetensors: truncated or damaged") as error:
            read()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("header", [b"[]", b"{}x", b'{"a": 1}', b"\xff\xff"])
def test_a_header_that_makes_no_sense_is_one_line(folder: Path, header: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    for read in (lambda: load_model(folder, dtype="float32"), lambda: model_digest(folder)):
        with pytest.raises(ValueError, match=r"model\.safetensors: truncated or damaged"):
            read()


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, model__layers__1__self_attn__k_proj__weight=None)
    with pytest.raises(
        ValueError, match=r"tensor model\.layers\.1\.self_attn\.k_proj\.weight is m"
    ):
        load_model(folder, dtype="float32")


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.ones(47))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[47\], not \[48\]"):
        load_model(folder, dtype="float32")


def test_a_tensor_that_is_not_floating_point_is_named(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.ones(48, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has dtype I32"):
        load_model(folder, dtype="float32")


def test_a_tensor_that_nothing_reads_is_an_error_unless_known_dead(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(5))
    load_model(folder, dtype="float32")
    rewrite(folder, model__layers__0__self_attn__q_proj__bias=torch.ones(60))
    with pytest.raises(ValueError, match=r"q_proj\.bias is not part of this architecture"):
        load_model(folder, dtype="float32")


def test_an_index_that_names_what_is_not_there_is_an_error(folder: Path) -> None:
    split_into_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names model-00002-of-00002\.safetensors, which is abse"):
        load_model(folder, dtype="float32")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../config.json"}}))
    with pytest.raises(ValueError, match="not a file of this folder"):
        load_model(folder, dtype="float32")
    index.write_text("{}")
    with pytest.raises(ValueError, match="weight_map is absent or empty"):
        load_model(folder, dtype="float32")


def test_a_copy_has_the_same_digest(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert model_digest(copy) == model_digest(folder)
    assert len(model_digest(folder)) == 64


def test_the_digest_sees_config_values_and_names(folder: Path, tmp_path: Path) -> None:
    digests = {model_digest(folder)}
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for index in (0, -1):
        changed = embedding.clone()
        changed.view(-1)[index] += 1
        rewrite(folder, model__embed_tokens__weight=changed)
        digests.add(model_digest(folder))
    rewrite(folder, model__embed_tokens__weight=None, model__renamed__weight=embedding)
    digests.add(model_digest(folder))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 2e-06'))
    digests.add(model_digest(folder))
    assert len(digests) == 5
