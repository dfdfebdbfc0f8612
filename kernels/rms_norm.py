"""Root mean square norm: y = weight * (x / sqrt(mean(x^2) + eps)).

The norm is computed in float32 and rounded to x's dtype before the weight is applied, which is
the order of transformers' LlamaRMSNorm.

The normed dim is the last one; whatever comes before it is kept.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """x normed over its last dim and scaled; a new tensor of x's dtype. weight broadcasts to x."""
    x_f32 = x.float()
    variance = x_f32.pow(2).mean(-1, keepdim=True)
    return weight * (x_f32 * torch.rsqrt(variance + eps)).to(x.dtype)
