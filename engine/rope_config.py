"""Which rotary embedding a config.json asks for: default, linear or llama3.

Precedence is transformers': the dict (`rope_scaling`, else `rope_parameters`) wins over the same
name at the top level. Other kinds (yarn, dynamic, longrope, mrope...) raise ValueError. No torch.
"""

from dataclasses import dataclass
from typing import Any

_KINDS = ("default", "linear", "llama3")
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """factor divides the frequencies (linear: all, llama3: the low ones).

    The last three fields are llama3's: wavelengths above original_max_positions / low_freq_factor
    are scaled, those below original_max_positions / high_freq_factor are not, and between the two
    it is blended.
    """

    kind: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


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
    low = _positive(field, "low_freq_factor", params, None)
    high = _positive(field, "high_freq_factor", params, None)
    if type(original) is not int or original < 1:
        raise ValueError(
            f"original_max_position_embeddings: {original!r} is not a positive integer"
        )
    if high <= low:
        raise ValueError(f"{field}: high_freq_factor {high} is not above low_freq_factor {low}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original,
    )


def _positive(field: str, name: str, params: dict[str, Any], default: Any) -> float:
    value = params.get(name, default)
    if type(value) not in (int, float) or value <= 0:
        raise ValueError(f"{field}: {name} {value!r} is not a positive number")
    return float(value)
