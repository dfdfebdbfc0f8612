"""config.json: what is understood, in both spellings, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.model_config import kv_layout, parse_model_config, read_model_config
from engine.rope import inverse_frequencies
from engine.rope_config import RopeConfig

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
QWEN2 = BASE | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = BASE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = BASE | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
WINDOWED = QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}


def without(raw: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != name}


def test_head_dim_is_derived_where_absent_and_taken_where_explicit() -> None:
    assert parse_model_config(BASE, {}).head_dim == 48 // 6
    assert parse_model_config(BASE | {"head_dim": 16}, {}).head_dim == 16
    assert parse_model_config(QWEN3, {}).head_dim == 128


def test_absent_kv_heads_mean_one_per_query_head_for_llama() -> None:
    assert parse_model_config(without(BASE, "num_key_value_heads"), {}).num_kv_heads == 6
    with pytest.raises(ValueError, match="num_key_value_heads: None"):
        parse_model_config(without(QWEN2, "num_key_value_heads"), {})


@pytest.mark.parametrize(
    ("raw", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"),
    [
        (BASE, False, False, False, False),
        (BASE | {"attention_bias": True, "mlp_bias": True}, True, True, True, False),
        (QWEN2, True, False, False, False),
        (QWEN3, False, False, False, True),
        (QWEN3 | {"attention_bias": True}, True, True, False, True),
        (MISTRAL, False, False, False, False),
    ],
)
def test_optional_parts_follow_the_architecture(
    raw: dict[str, Any], qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool
) -> None:
    config = parse_model_config(raw, {})
    parts = (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm)
    assert parts == (qkv_bias, o_bias, mlp_bias, qk_norm)


def test_eos_is_an_int_or_a_list_and_generation_config_wins() -> None:
    assert parse_model_config(BASE, {}).eos_token_ids == {2}
    assert parse_model_config(BASE | {"eos_token_id": [3, 4]}, {}).eos_token_ids == {3, 4}
    assert parse_model_config(BASE | {"eos_token_id": None}, {}).eos_token_ids == frozenset()
    assert parse_model_config(BASE, {"eos_token_id": [7, 8]}).eos_token_ids == {7, 8}
    assert parse_model_config(BASE, {"eos_token_id": None}).eos_token_ids == {2}


@pytest.mark.parametrize(
    "raw",
    [
        BASE,
        BASE | {"rope_theta": 5e5},
        BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        BASE | {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}},
        BASE | {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        BASE | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        BASE | {"rope_theta": 5e5, "rope_scaling": None, "head_dim": 64},
        BASE | {"rope_theta": 5e5, "rope_scaling": YARN},
        BASE | {"rope_parameters": YARN | {"rope_theta": 5e5, "beta_fast": 16, "beta_slow": 2}},
        BASE | {"rope_parameters": YARN | {"rope_theta": 1e4, "truncate": False}},
        BASE | {"rope_parameters": YARN | {"rope_theta": 1e4, "attention_factor": 1.25}},
        BASE | {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 2}},
    ],
)
def test_both_spellings_of_rope_give_the_frequencies_of_transformers(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    config = read_model_config(tmp_path)
    ours = inverse_frequencies(config.rope, config.head_dim)
    rotary = theirs.model.rotary_emb
    torch.testing.assert_close(ours, rotary.inv_freq, rtol=1e-6, atol=0)
    assert config.rope.attention_factor == pytest.approx(rotary.attention_scaling)


def test_both_spellings_of_rope_are_the_same_value() -> None:
    old = BASE | {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}}
    expected = RopeConfig(kind="linear", theta=2e4, factor=2.0)
    assert parse_model_config(old, {}).rope == parse_model_config(new, {}).rope == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (BASE | {"model_type": "gemma3"}, "model_type: 'gemma3' is not one of llama, qwen2"),
        (without(BASE, "model_type"), "model_type: None"),
        (BASE | {"architectures": ["LlamaForSequenceClassification"]}, "architectures: "),
        (BASE | {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not 'silu'"),
        (BASE | {"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4}"),
        (BASE | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope'"),
        (BASE | {"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast 0.5 is below beta_slow"),
        (BASE | {"rope_scaling": YARN | {"truncate": 1}}, "truncate 1 is not a boolean"),
        (BASE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        (BASE | {"rope_parameters": {"full_attention": {}}}, "rope_parameters: "),
        (BASE | {"rope_scaling": {"type": "linear"}}, "factor None is not a positive number"),
        (BASE | {"rope_theta": -1.0}, "rope_theta -1.0 is not a positive number"),
        (BASE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        (
            BASE | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "high_freq_factor 1.0 is not above low_freq_factor 1.0",
        ),
        (BASE | {"num_key_value_heads": 4}, "num_key_value_heads: 4 does not divide"),
        (BASE | {"head_dim": 7}, "head_dim: 7 is odd"),
        (BASE | {"hidden_size": 50}, "head_dim: absent, and num_attention_heads 6"),
        (BASE | {"num_hidden_layers": 0}, "num_hidden_layers: 0 is not a positive integer"),
        (without(BASE, "vocab_size"), "vocab_size: None is not a positive integer"),
        (BASE | {"eos_token_id": "2"}, "eos_token_id: '2'"),
        (BASE | {"attention_bias": "yes"}, "attention_bias: 'yes' is not a boolean"),
        (BASE | {"rms_norm_eps": 0}, "rms_norm_eps: 0 is not a positive number"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window: 0 is not a positive integer"),
        (BASE | {"layer_types": ["sliding_attention"] * 3}, "layer_types: "),
        (MISTRAL | {"layer_types": ["sliding_attention"] * 3}, "layer_types: "),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: "),
        (
            QWEN2 | {"layer_types": ["sliding_attention"] * 3},
            "layer_types: 'sliding_attention' with use_sliding_window False",
        ),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers: '1'"),
    ],
)
def test_what_is_not_computed_is_refused_by_field_and_value(
    raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_model_config(raw, {})


@pytest.mark.parametrize(
    "raw",
    [
        MISTRAL,
        MISTRAL | {"sliding_window": 4096},
        QWEN2 | {"sliding_window": 64, "use_sliding_window": False},
        QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
    ],
)
def test_a_sliding_window_that_no_token_can_leave_is_none(raw: dict[str, Any]) -> None:
    config = parse_model_config(raw, {})
    assert config.windows == (None, None, None)
    assert not config.has_window


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (MISTRAL | {"sliding_window": 64}, (64, 64, 64)),
        (WINDOWED, (64, 64, 64)),
        (WINDOWED | {"max_window_layers": 2}, (None, None, 64)),
        (
            WINDOWED | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            (64, None, None),
        ),
    ],
)
def test_windows_are_by_layer_as_transformers_reads_them(
    raw: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    config = parse_model_config(raw, {})
    assert config.windows == windows
    assert config.has_window
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert windows == tuple(
        layer.self_attn.sliding_window
        if raw["model_type"] == "qwen2"
        else theirs.config.sliding_window
        for layer in theirs.model.layers
    )


def test_a_mistral_that_does_not_say_has_the_default_window() -> None:
    raw = without(MISTRAL, "sliding_window") | {"max_position_embeddings": 32768}
    assert parse_model_config(raw, {}).windows == (4096, 4096, 4096)


def test_damaged_and_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent: no such folder"):
        read_model_config(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not readable as JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: holds list, not an object"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": "x"}))
    with pytest.raises(ValueError, match=r"config\.json: model_type: 'x'"):
        read_model_config(tmp_path)


def test_the_kv_layout_is_the_models() -> None:
    config = parse_model_config(BASE, {})
    layout = kv_layout(config, model_name="m", digest="d", dtype="bfloat16", block_size=16)
    assert layout.block_shape == (3, 2, 2, 16, 8)
    assert (layout.model, layout.model_digest, layout.dtype) == ("m", "d", "bfloat16")
