"""The second half of split attention: partial softmaxes over shares of a row's keys become one.

    out = sum_x share_x partial_x / (exp(sink) + sum_x share_x),   share_x = exp2(log_sum_x)

partial_x is already divided by its own sum; a share without keys has log_sum -inf.
Suffixes: R rows, N query heads, X splits, D head dim.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


def merge_splits(
    partial_RNXD: torch.Tensor,
    log_sum_RNX: torch.Tensor,
    out_TND: torch.Tensor,
    *,
    first_token_R: torch.Tensor,
    sinks_N: torch.Tensor | None,
) -> None:
    """Writes row r's result at token first_token_R[r] of out_TND."""
    num_rows, num_heads, num_splits, head_dim = partial_RNXD.shape
    _merge_splits[(num_rows, num_heads)](
        partial_RNXD,
        log_sum_RNX,
        out_TND,
        first_token_R,
        sinks_N if sinks_N is not None else partial_RNXD,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        NUM_SPLITS=num_splits,
        HAS_SINKS=sinks_N is not None,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["first_token_ptr"])
def _merge_splits(
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    first_token_ptr,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    part_X = (row * NUM_HEADS + head).to(tl.int64) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    log_sum_X = tl.load(log_sum_ptr + part_X)
    top = tl.max(log_sum_X, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    share_X = tl.exp2(log_sum_X - base)
    total = tl.sum(share_X, 0)
    if HAS_SINKS:
        total = total + tl.exp2(sink - base)
    d = tl.arange(0, BLOCK_D)
    is_dim = d < HEAD_DIM
    offset_XD = part_X[:, None] * HEAD_DIM + d[None, :]
    partial_XD = tl.load(partial_ptr + offset_XD, mask=is_dim[None, :], other=0.0)
    out_D = tl.sum(partial_XD * share_X[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_row = (tl.load(first_token_ptr + row).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_row + d, out_D.to(out_ptr.dtype.element_ty), mask=is_dim)
