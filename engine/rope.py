"""Cosines and sines of rotary embeddings, computed once per step for all layers.

Always in float32, as transformers does: a position beyond 256 has no exact bfloat16.

Suffixes: T packed tokens, F half the head dim.
"""

import math

import torch

from engine.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """inv_freq_F in float32: theta ** (-2i / head_dim), scaled as the config says."""
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq_F = 1.0 / (rope.theta**exponent_F)
    if rope.kind == "linear":
        return inv_freq_F / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq_F)
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq_F)
    return inv_freq_F


def cos_and_sin(
    positions_T: torch.Tensor,
    inv_freq_F: torch.Tensor,
    *,
    dtype: torch.dtype,
    attention_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_TF and sin_TF in dtype; both halves of a head are turned by the same angles.

    attention_factor is RopeConfig's: it scales Q and K, and so their products by its square.
    """
    angles_TF = positions_T[:, None].float() * inv_freq_F
    cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
    if attention_factor != 1.0:
        cos_TF, sin_TF = cos_TF * attention_factor, sin_TF * attention_factor
    return cos_TF.to(dtype), sin_TF.to(dtype)


def _llama3(rope: RopeConfig, inv_freq_F: torch.Tensor) -> torch.Tensor:
    """Source: transformers, modeling_rope_utils._compute_llama3_parameters."""
    original = rope.original_max_positions
    wavelength_F = 2 * math.pi / inv_freq_F
    is_low_F = wavelength_F > original / rope.low_freq_factor
    is_high_F = wavelength_F < original / rope.high_freq_factor
    smooth_F = (original / wavelength_F - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended_F = (1 - smooth_F) * inv_freq_F / rope.factor + smooth_F * inv_freq_F
    scaled_F = torch.where(is_low_F, inv_freq_F / rope.factor, inv_freq_F)
    return torch.where(~is_low_F & ~is_high_F, blended_F, scaled_F)


def _yarn(rope: RopeConfig, inv_freq_F: torch.Tensor) -> torch.Tensor:
    """Source: transformers, modeling_rope_utils._compute_yarn_parameters; Peng et al. 2023."""
    num_freqs = inv_freq_F.shape[0]
    head_dim = 2 * num_freqs

    def dim_of(num_turns: float) -> float:
        """The dim whose frequency makes so many turns within the original positions."""
        turn = rope.original_max_positions / (num_turns * 2 * math.pi)
        return head_dim * math.log(turn) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    scaled_share_F = ((torch.arange(num_freqs, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq_F / rope.factor * scaled_share_F + inv_freq_F * (1 - scaled_share_F)
