"""The gate of a SwiGLU MLP: y = silu(gate) * up, silu(x) = x * sigmoid(x).

silu is rounded to the tensor's dtype before the product, as transformers does.
Suffixes: T packed tokens, F the MLP's intermediate dim; 2F holds gate, then up.
"""

import torch
import torch.nn.functional as F

from kernels.dispatch import on_gpu


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """y_TF from the output of the fused gate and up projection; a new tensor."""
    if on_gpu(gate_up_T2F):
        from kernels.triton import silu_and_mul as fast

        return fast.silu_and_mul(gate_up_T2F)
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)
