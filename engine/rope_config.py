"""Which rotary embedding a config.json asks for: default, linear, llama3 or yarn.

Precedence is transformers': the dict (`rope_scaling`, else `rope_parameters`) wins over the same
name at the top level. Other kinds (longrope, mrope...) raise ValueError, and so does dynamic: its
keys depend on the longest sequence seen, so a cached block would not be the same KV for everybody.
No torch.
"""

import math
from dataclasses import dataclass
from typing import Any

_KINDS = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """factor divides the frequencies (linear: all, llama3 and yarn: the low ones).

    llama3: wavelengths above original_max_positions / low_freq_factor are scaled, those below
    original_max_positions / high_freq_factor are not, and between the two it is blended.
    yarn: the same, by turns within original_max_positions: below beta_slow scaled, above beta_fast
    not; truncate rounds the two dims outwards. Cosines and sines are times attention_factor.
    """

    kind: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope_config(raw: dict[str, Any], max_positions: int) -> RopeConfig:
    """The rotary part of a config.json. Raises ValueError naming the field and its value."""
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    params = raw.get(field) or {}
    if not isinstance(params, dict) or any(isinstance(value, dict) for value in params.values()):
        raise ValueError(f"{field}: {params!r}; one rotary embedding for all layers is supported")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in _KINDS:
        raise ValueError(f"{field}: rope type {kind!r} is not one of {', '.join(_KINDS)}")
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: {partial!r}; only whole heads are rotated")
    theta = _positive(field, "rope_theta", params, raw.get("rope_theta", _DEFAULT_THETA))
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _positive(field, "factor", params, None)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    # transformers prefers the top-level field where there is one.
    original = raw.get("original_max_position_embeddings") or params.get(
        "original_max_position_embeddings", max_positions
    )
    if type(original) is not int or original < 1:
        raise ValueError(
            f"original_max_position_embeddings: {original!r} is not a positive integer"
        )
    read = _read_yarn if kind == "yarn" else _read_llama3
    return read(field, params, theta=theta, factor=factor, original=original)


def _read_llama3(
    field: str, params: dict[str, Any], *, theta: float, factor: float, original: int
) -> RopeConfig:
    low = _positive(field, "low_freq_factor", params, None)
    high = _positive(field, "high_freq_factor", params, None)
    if high <= low:
        raise ValueError(f"{field}: high_freq_factor {high} is not above low_freq_factor {low}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original,
    )


def _read_yarn(
    field: str, params: dict[str, Any], *, theta: float, factor: float, original: int
) -> RopeConfig:
    """Source: transformers, modeling_rope_utils._compute_yarn_parameters."""
    # There, null and 0 mean the default.
    given = {name: value for name, value in params.items() if value}
    fast = _positive(field, "beta_fast", given, 32.0)
    slow = _positive(field, "beta_slow", given, 1.0)
    if fast < slow:
        raise ValueError(f"{field}: beta_fast {fast} is below beta_slow {slow}")
    truncate = params.get("truncate", True)
    if type(truncate) is not bool:
        raise ValueError(f"{field}: truncate {truncate!r} is not a boolean")
    if params.get("attention_factor") is not None:
        attention_factor = _positive(field, "attention_factor", params, None)
    elif given.get("mscale") and given.get("mscale_all_dim"):
        attention_factor = _yarn_scale(
            factor, _positive(field, "mscale", given, None)
        ) / _yarn_scale(factor, _positive(field, "mscale_all_dim", given, None))
    else:
        attention_factor = _yarn_scale(factor, 1.0)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        attention_factor=attention_factor,
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _positive(field: str, name: str, params: dict[str, Any], default: Any) -> float:
    value = params.get(name, default)
    if type(value) not in (int, float) or value <= 0:
        raise ValueError(f"{field}: {name} {value!r} is not a positive number")
    return float(value)
