"""The gate of a SwiGLU MLP: y = silu(gate) * up, silu(x) = x * sigmoid(x).

Suffixes: T packed tokens, F the MLP's intermediate dim; 2F holds gate, then up.
"""

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """y_TF from the output of the fused gate and up projection; a new tensor."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)
