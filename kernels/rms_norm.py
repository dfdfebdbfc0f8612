"""Root mean square norm, with or without the residual add before it.

    rms_norm(x)           y = weight * (x / sqrt(mean(x^2) + eps))
    add_rms_norm(x, r)    s = x + r;  y = rms_norm(s);  both are returned

The norm is computed in float32 and rounded to x's dtype before the weight is applied, which is
the order of transformers' LlamaRMSNorm. s is rounded to x's dtype first.

The normed dim is the last one; whatever comes before it is kept.
"""

import torch

from kernels.dispatch import on_gpu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """x normed over its last dim and scaled; a new tensor of x's dtype.

    weight has x's last dim, or its last two.
    """
    if on_gpu(x):
        from kernels.triton import rms_norm as fast

        return fast.rms_norm(x, weight, eps=eps)
    x_f32 = x.float()
    variance = x_f32.pow(2).mean(-1, keepdim=True)
    return weight * (x_f32 * torch.rsqrt(variance + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of x + residual, x + residual); new tensors of x's shape and dtype."""
    if on_gpu(x):
        from kernels.triton import rms_norm as fast

        return fast.add_rms_norm(x, residual, weight, eps=eps)
    total = x + residual
    return rms_norm(total, weight, eps=eps), total
