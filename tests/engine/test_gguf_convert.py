"""GGUF to Hugging Face: weights bit for bit, and text to the ids that the model was trained on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.catalog import resolve_model
from engine.gguf_convert import convert, main
from engine.model_config import read_model_config
from tests.models import make_tiny_model
from tests.tiny_gguf import CHAT_TEMPLATE, TINY_VOCAB_SIZE, write_tiny_gguf


def _tiny(path: Path, architecture: str = "llama", *, tied: bool = False) -> Path:
    return make_tiny_model(
        path,
        architecture,
        vocab_size=TINY_VOCAB_SIZE,
        tie_word_embeddings=tied,
        bos_token_id=256,
        eos_token_id=258,
        # transformers has 1e-6 for llama, and GGUF keeps a float32 of it.
        rms_norm_eps=1e-5,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve_model("smollm2-135m", allow_download=True).folder


def _convert(gguf: Path) -> Path:
    folder = gguf.with_suffix("")
    folder.mkdir()
    convert(gguf, folder=folder)
    return folder


@pytest.mark.parametrize(
    ("architecture", "pre", "tied"),
    [
        ("llama", "smollm", True),
        ("llama", "gpt-2", False),
        ("qwen2", "qwen2", False),
        ("qwen3", "qwen2", True),
    ],
)
def test_weights_and_config_come_back(
    tmp_path: Path, architecture: str, pre: str, tied: bool
) -> None:
    source = _tiny(tmp_path / "source", architecture, tied=tied)
    folder = _convert(write_tiny_gguf(tmp_path / "m.gguf", source=source, pre=pre))
    expected = load_file(source / "model.safetensors")
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == expected.keys()
    assert ("lm_head.weight" in converted) == (not tied)
    for name, tensor in expected.items():
        assert torch.equal(converted[name], tensor.to(torch.bfloat16)), name
    assert read_model_config(folder) == read_model_config(source)


def test_smollm_digits_are_single_tokens_though_a_merge_would_join_them(
    tmp_path: Path, source: Path
) -> None:
    folder = _convert(write_tiny_gguf(tmp_path / "m.gguf", source=source, pre="smollm"))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a12").ids
    assert ids == [ord("a"), ord("1"), ord("2")]


def test_gpt2_digits_are_joined(tmp_path: Path, source: Path) -> None:
    folder = _convert(write_tiny_gguf(tmp_path / "m.gguf", source=source, pre="gpt-2"))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a12").ids == [ord("a"), 259]


def test_chat_template_and_special_tokens_are_kept(tmp_path: Path, source: Path) -> None:
    folder = _convert(write_tiny_gguf(tmp_path / "m.gguf", source=source))
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("x<|im_end|>")
    assert encoded.ids == [ord("x"), 258]
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    assert tokenizer_config["bos_token"] == "<|begin|>"


def test_end_of_turn_ends_generation_too(tmp_path: Path, source: Path) -> None:
    folder = _convert(write_tiny_gguf(tmp_path / "m.gguf", source=source, eot_token_id=257))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [258, 257]
    assert read_model_config(folder).eos_token_ids == {257, 258}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported"),
        ({"pre": "martian"}, "pre-tokenizer 'martian' is not supported"),
        ({"rope_scaling": "yarn"}, "scaled rope"),
        ({"extra": {"rope_freqs.weight": np.ones(5, np.float32)}}, "'rope_freqs.weight'"),
        ({"without": "blk.2.ffn_up.weight"}, r"missing.*'model.layers.2.mlp.up_proj.weight'"),
    ],
)
def test_what_would_come_out_wrong_is_refused(
    tmp_path: Path, source: Path, wrong: dict[str, object], message: str
) -> None:
    gguf = write_tiny_gguf(tmp_path / "m.gguf", source=source, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        _convert(gguf)


def test_the_program_says_in_one_line_that_a_file_is_no_gguf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no model" * 100)
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "m")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_smollm2_splits_numbers_into_digits(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    pieces = tokenizer.encode("In 1969, 3.14 x2").tokens
    assert pieces == ["In", "Ġ", "1", "9", "6", "9", ",", "Ġ", "3", ".", "1", "4", "Ġx", "2"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  leading\n\n\ttabs  ",
        "It's 12:34, don't.",
        "naïve 東京 🙂‍↔️ ٣½",
        "<|im_start|>user\nHi<|im_end|>\n",
        "def f(x):\n    return x\r\n",
    ],
)
def test_smollm2_text_survives_a_round_trip_and_transformers_agrees(
    smollm2: Path, text: str
) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # "auto" must read the file rather than rebuild a llama tokenizer around its vocabulary.
    assert AutoTokenizer.from_pretrained(smollm2).encode(text) == ids


def test_smollm2_special_tokens_are_the_first_17_ids(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == list(range(17))
    assert all(token.special for token in added.values())
    assert [added[i].content for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("a<|im_end|>").ids[-1] == 2


def test_smollm2_chat_has_its_default_system_message_once(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, *chat]
    assert "SmolLM" not in tokenizer.apply_chat_template(own, tokenize=False)


def test_smollm2_is_a_sane_model(smollm2: Path) -> None:
    config = read_model_config(smollm2)
    assert (config.num_layers, config.vocab_size, config.tie_embeddings) == (30, 49152, True)
    assert (config.rope.theta, config.eos_token_ids) == (100_000.0, {2})
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    model, loading = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    prompt = "Paris is in France. The capital of France is"
    with torch.inference_mode():
        logits_BTV = model(torch.tensor([tokenizer.encode(prompt).ids])).logits
    assert tokenizer.decode([int(logits_BTV[0, -1].argmax())]) == " Paris"
