"""The gate of a SwiGLU MLP in Triton: each element read once, written once.

The formula is in kernels/silu_and_mul.py. Suffixes: T packed tokens, F the MLP's intermediate dim.
"""

import torch
import triton
import triton.language as tl

# Elements of a program.
_BLOCK = 1024


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """kernels.silu_and_mul.silu_and_mul; the argument is contiguous."""
    assert gate_up_T2F.is_contiguous()
    num_tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(num_tokens, size)
    if num_tokens:
        block = min(_BLOCK, triton.next_power_of_2(size))
        grid = (num_tokens, triton.cdiv(size, block))
        _silu_and_mul[grid](gate_up_T2F, out_TF, SIZE=size, BLOCK=block, num_warps=4)
    return out_TF


@triton.jit
def _silu_and_mul(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64)
    mask = f < SIZE
    gate_F = tl.load(gate_up_ptr + token * 2 * SIZE + f, mask=mask, other=0.0)
    up_F = tl.load(gate_up_ptr + token * 2 * SIZE + SIZE + f, mask=mask, other=0.0)
    x_F = gate_F.to(tl.float32)
    silu_F = (x_F / (1.0 + tl.exp(-x_F))).to(gate_F.dtype)
    out_F = silu_F.to(tl.float32) * up_F.to(tl.float32)
    tl.store(out_ptr + token * SIZE + f, out_F.to(gate_F.dtype), mask=mask)
