"""Root mean square norm in Triton, with or without the residual add: one pass over memory.

    program: ROWS rows at a time in registers, as a [ROWS, E] tile in float32

Heads (D elements) come many to a program, hidden states one. The formula, and what is rounded
when, are in kernels/rms_norm.py. Suffixes: R rows, E elements of a row.
"""

import torch
import triton
import triton.language as tl

# Elements of a program, at least; a row of more is a program of its own.
_TILE = 2048

# Elements of a thread: fewer warps for a short row, so that its sum stays cheap.
_PER_THREAD = 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """kernels.rms_norm.rms_norm; x is [T, E] or [T, heads, E], its rows may be strided."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """kernels.rms_norm.add_rms_norm; residual is contiguous."""
    assert residual.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * heads
    if num_rows == 0:
        return
    assert x.stride(-1) == 1 and weight.is_contiguous()
    block = triton.next_power_of_2(size)
    rows = max(1, _TILE // block)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        total if total is not None else out,
        num_rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
        HEADS=heads,
        WEIGHT_ROWS=weight.numel() // size,
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=min(16, max(1, rows * block // (32 * _PER_THREAD))),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    mask = (row_R < num_rows)[:, None] & (e < SIZE)[None, :]
    head_R = row_R % HEADS
    x_row_R = (row_R // HEADS).to(tl.int64) * token_stride + head_R * head_stride
    x_RE = tl.load(x_ptr + x_row_R[:, None] + e[None, :], mask=mask, other=0.0)
    dtype = x_RE.dtype
    offset_RE = row_R.to(tl.int64)[:, None] * SIZE + e[None, :]
    if ADDS:
        residual_RE = tl.load(residual_ptr + offset_RE, mask=mask, other=0.0)
        x_RE = (x_RE.to(tl.float32) + residual_RE.to(tl.float32)).to(dtype)
        tl.store(total_ptr + offset_RE, x_RE, mask=mask)
    x_RE = x_RE.to(tl.float32)
    variance_R = tl.sum(x_RE * x_RE, 1) / SIZE
    normed_RE = (x_RE * tl.rsqrt(variance_R + eps)[:, None]).to(dtype)
    weight_offset = (head_R % WEIGHT_ROWS)[:, None] * SIZE + e[None, :]
    weight_RE = tl.load(weight_ptr + weight_offset, mask=mask, other=0.0)
    out_RE = weight_RE.to(tl.float32) * normed_RE.to(tl.float32)
    tl.store(out_ptr + offset_RE, out_RE.to(dtype), mask=mask)
