"""A weight in the panels that the C++ kernels multiply with; the layout is in kernels/cpu/api.h.

Suffixes: O out features, I in features, P panels, K pairs of in features.
"""

import torch
import torch.nn.functional as F

from kernels.cpu.arena import Arena
from kernels.cpu.library import PANEL, CLinear


def padded(size: int, *, to: int = PANEL) -> int:
    return -(-size // to) * to


class PackedLinear:
    """Owner of the packed copy; the weight passed in is not kept."""

    def __init__(
        self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None, *, arena: Arena
    ) -> None:
        num_out, num_in = weight_OI.shape
        out_p, in_p = padded(num_out), padded(num_in)
        weight_OI = F.pad(weight_OI, (0, in_p - num_in, 0, out_p - num_out))
        self._panels = arena.allocate(out_p // PANEL, in_p // 2, PANEL, 2)
        self._panels.copy_(weight_OI.view(out_p // PANEL, PANEL, in_p // 2, 2).transpose(1, 2))
        self._bias = None if bias_O is None else F.pad(bias_O, (0, out_p - num_out)).contiguous()
        self.c_struct = CLinear(
            panels=self._panels.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            in_p=in_p,
            out_p=out_p,
        )


def interleave_gate_up(gate_up_2FI: torch.Tensor) -> torch.Tensor:
    """Gate then up, of F outputs each, as 16 of gate, 16 of up, and so on, F padded to 32: a panel
    then holds all that silu(gate) * up needs. For weights [2F, I] and biases [2F]."""
    inner = gate_up_2FI.shape[0] // 2
    rest = (0, 0) * (gate_up_2FI.ndim - 1)
    halves = gate_up_2FI.view(2, inner, *gate_up_2FI.shape[1:])
    halves = F.pad(halves, (*rest, 0, padded(inner) - inner))
    halves = halves.view(2, -1, PANEL // 2, *gate_up_2FI.shape[1:])
    return halves.transpose(0, 1).flatten(0, 2)


def pad_heads(weight: torch.Tensor, *, head_dim: int, dim: int) -> torch.Tensor:
    """A dim of heads times head_dim, each head padded with zeros to a multiple of PANEL."""
    sizes = (*weight.shape[:dim], -1, head_dim, *weight.shape[dim + 1 :])
    weight = weight.reshape(sizes).movedim(dim + 1, -1)
    weight = F.pad(weight, (0, padded(head_dim) - head_dim)).movedim(-1, dim + 1)
    return weight.flatten(dim, dim + 1)
