"""What a model folder says about its shape: config.json, read once, into a frozen value.

    config.json + generation_config.json --read_model_config--> ModelConfig --kv_layout--> KvLayout

Both spellings of rotary parameters are read: `rope_parameters` (transformers 5) and `rope_theta`
with `rope_scaling` (before). What this engine does not compute raises ValueError with the field's
name and value, because a model that almost fits gives text that almost makes sense. No torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.rope_config import RopeConfig, read_rope_config
from kvtransfer.layout import KvLayout

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}

# transformers' class defaults, which are what an absent field means.
_DEFAULT_WINDOW = 4096
_DEFAULT_FIRST_WINDOW_LAYER = 28
_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the llama family: sizes, and which of the optional parts it has.

    windows has an entry per layer: how many positions back, itself included, a token sees, or
    None for all of them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    eos_token_ids: frozenset[int]
    windows: tuple[int | None, ...]

    @property
    def has_window(self) -> bool:
        """Whether some layer does not see all positions."""
        return any(window is not None for window in self.windows)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError if it is absent or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}, not an object")
    return value


def read_model_config(folder: Path) -> ModelConfig:
    """The model in a folder. Raises ValueError, one line, for anything unsupported or absent."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    path = folder / "config.json"
    raw = read_json(path)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    try:
        return parse_model_config(raw, generation)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_model_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The contents of config.json and generation_config.json, checked. Raises ValueError."""
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    num_layers = _size(raw, "num_hidden_layers")
    num_query_heads = _size(raw, "num_attention_heads")
    num_kv_heads = _num_kv_heads(raw, architecture, num_query_heads)
    hidden_size = _size(raw, "hidden_size")
    max_positions = _size(raw, "max_position_embeddings")
    # qwen2 and mistral have no switch for their biases; transformers ignores the field there.
    attention_bias = architecture in ("llama", "qwen3") and _flag(raw, "attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(raw, architecture, hidden_size, num_query_heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=read_rope_config(raw, max_positions),
        qkv_bias=architecture == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == "llama" and _flag(raw, "mlp_bias"),
        qk_norm=architecture == "qwen3",
        tie_embeddings=_flag(raw, "tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(raw, generation),
        windows=_windows(raw, architecture, num_layers, max_positions),
    )


def kv_layout(
    config: ModelConfig, *, model_name: str, digest: str, dtype: str, block_size: int
) -> KvLayout:
    """The layout of this model's KV blocks. Raises ValueError for an unknown dtype or size."""
    return KvLayout(
        model=model_name,
        model_digest=digest,
        dtype=dtype,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _architecture(raw: dict[str, Any]) -> str:
    model_type = raw.get("model_type")
    if model_type not in _CLASSES:
        raise ValueError(f"model_type: {model_type!r} is not one of {', '.join(_CLASSES)}")
    classes = raw.get("architectures")
    if classes and classes != [_CLASSES[model_type]]:
        raise ValueError(f"architectures: {classes!r} is not [{_CLASSES[model_type]!r}]")
    return str(model_type)


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"]
        raise ValueError(f"quantization_config: {method!r}; quantized weights are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: {raw['hidden_act']!r} is not 'silu'")


def _windows(
    raw: dict[str, Any], architecture: str, num_layers: int, max_positions: int
) -> tuple[int | None, ...]:
    """A window that no sequence can outgrow is none."""
    layer_types = _layer_types(raw, architecture, num_layers)
    if "sliding_attention" not in layer_types:
        return (None,) * num_layers
    window = raw.get("sliding_window", _DEFAULT_WINDOW)
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window: {window!r} is not a positive integer")
    if window is None or window >= max_positions:
        return (None,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _layer_types(raw: dict[str, Any], architecture: str, num_layers: int) -> list[str]:
    """What transformers' configuration class makes of the fields."""
    kinds = ("full_attention", "sliding_attention")
    given = raw.get("layer_types")
    if architecture in ("llama", "mistral"):
        # These do not look at the field; a file where it says otherwise means another model.
        has_window = raw.get("sliding_window", _DEFAULT_WINDOW) is not None
        kind = kinds[architecture == "mistral" and has_window]
        if any(layer_type != kind for layer_type in given or ()):
            raise ValueError(f"layer_types: {given!r} is not all {kind!r}")
        return [kind] * num_layers
    is_used = _flag(raw, "use_sliding_window")
    if given is None:
        first = raw.get("max_window_layers", _DEFAULT_FIRST_WINDOW_LAYER)
        if type(first) is not int:
            raise ValueError(f"max_window_layers: {first!r} is not an integer")
        return [kinds[is_used and layer >= first] for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        raise ValueError(f"layer_types: {given!r} is not a list of {num_layers}")
    for layer_type in given:
        if layer_type not in kinds[: 1 + is_used]:
            raise ValueError(f"layer_types: {layer_type!r} with use_sliding_window {is_used}")
    return given


def _num_kv_heads(raw: dict[str, Any], architecture: str, num_query_heads: int) -> int:
    absent_means_all = architecture == "llama" or "num_key_value_heads" in raw
    if raw.get("num_key_value_heads") is None and absent_means_all:
        return num_query_heads
    num_kv_heads = _size(raw, "num_key_value_heads")
    if num_query_heads % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads: {num_kv_heads} does not divide "
            f"num_attention_heads {num_query_heads}"
        )
    return num_kv_heads


def _head_dim(
    raw: dict[str, Any], architecture: str, hidden_size: int, num_query_heads: int
) -> int:
    if raw.get("head_dim") is not None:
        head_dim = _size(raw, "head_dim")
    elif architecture == "qwen3":
        head_dim = _QWEN3_HEAD_DIM
    elif hidden_size % num_query_heads:
        raise ValueError(
            f"head_dim: absent, and num_attention_heads {num_query_heads} does not divide "
            f"hidden_size {hidden_size}"
        )
    else:
        head_dim = hidden_size // num_query_heads
    if head_dim % 2:
        raise ValueError(f"head_dim: {head_dim} is odd, which rotary embeddings cannot split")
    return head_dim


def _eos_token_ids(raw: dict[str, Any], generation: dict[str, Any]) -> frozenset[int]:
    """generation_config.json wins where it names any, as in transformers' generate."""
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ValueError(f"eos_token_id: {value!r} is not a token id or a list of them")
    return frozenset(ids)


def _size(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: {value!r} is not a positive integer")
    return value


def _flag(raw: dict[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if type(value) is not bool:
        raise ValueError(f"{name}: {value!r} is not a boolean")
    return value


def _number(raw: dict[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if type(value) not in (int, float) or value <= 0:
        raise ValueError(f"{name}: {value!r} is not a positive number")
    return float(value)
