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
    return inv_freq_F


def cos_and_sin(
    positions_T: torch.Tensor, inv_freq_F: torch.Tensor, *, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_TF and sin_TF in dtype; both halves of a head are turned by the same angles."""
    angles_TF = positions_T[:, None].float() * inv_freq_F
    return angles_TF.cos().to(dtype), angles_TF.sin().to(dtype)


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
