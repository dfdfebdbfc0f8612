"""Causal attention of packed rows over the block pool, in Triton: flash-style, split over keys.

    program (tile of queries, kv head, row or split):
        q [M, D] <- M = up to BLOCK_M pairs of (query, query head of this kv head)
        for BLOCK_N keys at a time:   s = q k^T;  running max, sum and weighted V, in float32
        out <- acc / sum,   or with splits: acc / sum and log2-sum-exp, merged by merge_splits.py

The query heads of a kv head share a tile, so that a key is read once for all of them. Decode rows
are one query each: too few tiles to fill a GPU, so their keys are split over programs. A key slot
at or past the row's end is never loaded: another request may have left a NaN there.

Suffixes: T packed tokens, R rows, N query heads, H kv heads, G query heads per kv head, D head
dim, M rows of a tile, X splits.
"""

import functools

import torch
import triton
import triton.language as tl

from kernels.packed_rows import PackedRows
from kernels.triton.attention_tiles import Tile, chunk_tiles, decode_tiles
from kernels.triton.merge_splits import LOG2E, merge_splits

# Programs per multiprocessor that decode rows are split into, and the most splits of a row.
_WAVES = 2
_MAX_SPLITS = 32

# Where no GPU says how many multiprocessors it has (under the interpreter): an H100's.
_DEFAULT_PROCESSORS = 132


def paged_attention(
    q_TND: torch.Tensor,
    *,
    pool: torch.Tensor,
    layer: int,
    rows: PackedRows,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: torch.Tensor | None = None,
    decode_tile: Tile | None = None,
    chunk_tile: Tile | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """kernels.paged_attention.paged_attention of packed rows; a new out_TND.

    q_TND is contiguous. The last three arguments replace what is chosen otherwise.
    """
    group_size, head_dim = q_TND.shape[1] // pool.shape[3], pool.shape[5]
    out_TND = torch.empty_like(q_TND)
    launch = functools.partial(
        _launch, q_TND, out_TND, pool[:, layer], rows, window or 0, soft_cap or 0.0, sinks_N
    )
    if rows.num_decode:
        tile = decode_tile or decode_tiles(group_size, head_dim, q_TND.dtype)[0]
        splits = num_splits or _num_splits(rows.num_decode * pool.shape[3], q_TND.device)
        launch(tile, first_row=0, num_rows=rows.num_decode, max_queries=1, num_splits=splits)
    if rows.num_rows > rows.num_decode:
        has_options = any(option is not None for option in (window, soft_cap, sinks_N))
        tiles = chunk_tiles(group_size, head_dim, q_TND.dtype, has_options=has_options)
        tile = chunk_tile or tiles[0]
        launch(
            tile,
            first_row=rows.num_decode,
            num_rows=rows.num_rows - rows.num_decode,
            max_queries=rows.max_chunk,
            num_splits=1,
        )
    return out_TND


def _num_splits(num_programs: int, device: torch.device) -> int:
    """A power of two: each is a kernel of its own. It depends on the batch, not on contexts, so
    that a captured step may be replayed with any."""
    wanted = _WAVES * _num_processors(device) // max(1, num_programs)
    return min(_MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(
    q_TND: torch.Tensor,
    out_TND: torch.Tensor,
    layer_pool: torch.Tensor,
    rows: PackedRows,
    window: int,
    soft_cap: float,
    sinks_N: torch.Tensor | None,
    tile: Tile,
    *,
    first_row: int,
    num_rows: int,
    max_queries: int,
    num_splits: int,
) -> None:
    _, _, num_kv_heads, block_size, head_dim = layer_pool.shape
    num_heads = q_TND.shape[1]
    group_size = num_heads // num_kv_heads
    block_q = tile.block_m // group_size
    if num_splits > 1:
        partial = torch.empty(
            (num_rows, num_heads, num_splits, head_dim), dtype=torch.float32, device=q_TND.device
        )
        log_sum = torch.empty(partial.shape[:3], dtype=torch.float32, device=q_TND.device)
    else:
        partial, log_sum = out_TND, out_TND
    num_tiles = num_splits if max_queries == 1 else triton.cdiv(max_queries, block_q)
    _attend[(num_tiles, num_kv_heads, num_rows)](
        q_TND,
        out_TND,
        partial,
        log_sum,
        layer_pool[:, 0],
        layer_pool[:, 1],
        rows.blocks,
        rows.first_token_R[first_row:],
        rows.num_tokens_R[first_row:],
        rows.context_R[first_row:],
        rows.table_start_R[first_row:],
        sinks_N if sinks_N is not None else q_TND,
        layer_pool.stride(0),
        head_dim**-0.5,
        soft_cap,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_Q=1 if max_queries == 1 else block_q,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        NUM_SPLITS=num_splits,
        WINDOW=window,
        HAS_SOFT_CAP=soft_cap > 0,
        HAS_SINKS=sinks_N is not None,
        PRECISION="ieee" if q_TND.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        merge_splits(
            partial,
            log_sum,
            out_TND,
            first_token_R=rows.first_token_R[first_row:],
            sinks_N=sinks_N,
        )


# Their alignment changes with the step: kernels made for one would be compiled in mid-serving.
_ROW_POINTERS = [
    "blocks_ptr",
    "first_token_ptr",
    "num_tokens_ptr",
    "context_ptr",
    "table_start_ptr",
]


@triton.jit(do_not_specialize_on_alignment=_ROW_POINTERS)
def _attend(
    q_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    k_ptr,
    v_ptr,
    blocks_ptr,
    first_token_ptr,
    num_tokens_ptr,
    context_ptr,
    table_start_ptr,
    sinks_ptr,
    block_stride,
    scale,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    num_tokens = tl.load(num_tokens_ptr + row)
    context = tl.load(context_ptr + row)
    if BLOCK_Q == 1:
        first_query = 0
        split = tl.program_id(0)
    else:
        # The longest tiles start first.
        first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
        split = 0
    if first_query >= num_tokens:
        return

    m = tl.arange(0, BLOCK_M)
    query_M = first_query + m // GROUP
    head_M = kv_head * GROUP + m % GROUP
    is_query_M = (m < BLOCK_Q * GROUP) & (query_M < num_tokens)
    d = tl.arange(0, BLOCK_D)
    first_token = tl.load(first_token_ptr + row)
    num_heads = NUM_KV_HEADS * GROUP
    q_row_M = (first_token + query_M).to(tl.int64) * num_heads + head_M
    q_mask = is_query_M[:, None] & (d < HEAD_DIM)[None, :]
    q_MD = tl.load(q_ptr + q_row_M[:, None] * HEAD_DIM + d[None, :], mask=q_mask, other=0.0)

    position_M = context - num_tokens + query_M
    # Keys that some query of this tile sees, and this program's share of them.
    end = tl.minimum(context, context - num_tokens + first_query + BLOCK_Q)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(0, context - num_tokens + first_query - WINDOW + 1)
    if NUM_SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - start, BLOCK_N), NUM_SPLITS) * BLOCK_N
        start = start + split * share
        end = tl.minimum(end, start + share)

    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = blocks_ptr + tl.load(table_start_ptr + row)
    for first_key in range(start, end, BLOCK_N):
        key_N = first_key + tl.arange(0, BLOCK_N)
        is_key_N = key_N < end
        block_N = tl.load(table_ptr + key_N // BLOCK_SIZE, mask=is_key_N, other=0).to(tl.int64)
        slot_N = kv_head * BLOCK_SIZE + key_N % BLOCK_SIZE
        offset_N = block_N * block_stride + slot_N * HEAD_DIM
        kv_mask = is_key_N[:, None] & (d < HEAD_DIM)[None, :]
        k_ND = tl.load(k_ptr + offset_N[:, None] + d[None, :], mask=kv_mask, other=0.0)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
        if HAS_SOFT_CAP:
            # tanh(x) = 1 - 2 / (1 + exp(2x)), right at both ends.
            score_MN = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(score_MN * (2.0 / soft_cap))))
        sees = is_key_N[None, :] & (key_N[None, :] <= position_M[:, None])
        if WINDOW > 0:
            sees = sees & (key_N[None, :] > position_M[:, None] - WINDOW)
        score_MN = tl.where(sees, score_MN * LOG2E, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MN, 1))
        # A query that has seen nothing yet: exp2(-inf - -inf) would be NaN.
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        weight_MN = tl.exp2(score_MN - base_M[:, None])
        decay_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * decay_M + tl.sum(weight_MN, 1)
        v_ND = tl.load(v_ptr + offset_N[:, None] + d[None, :], mask=kv_mask, other=0.0)
        acc_MD = acc_MD * decay_M[:, None]
        acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
        max_M = new_max_M

    if NUM_SPLITS > 1:
        # exp2(log_sum) is this split's share of the softmax's denominator.
        safe_sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
        acc_MD = acc_MD / safe_sum_M[:, None]
        log_sum_M = tl.where(sum_M == 0.0, float("-inf"), max_M + tl.log2(safe_sum_M))
        part_M = (row * num_heads + head_M).to(tl.int64) * NUM_SPLITS + split
        tl.store(log_sum_ptr + part_M, log_sum_M, mask=is_query_M)
        tl.store(partial_ptr + part_M[:, None] * HEAD_DIM + d[None, :], acc_MD, mask=q_mask)
    else:
        if HAS_SINKS:
            sink_M = tl.load(sinks_ptr + head_M, mask=is_query_M, other=0.0).to(tl.float32)
            top_M = tl.maximum(max_M, sink_M * LOG2E)
            decay_M = tl.exp2(max_M - top_M)
            acc_MD = acc_MD * decay_M[:, None]
            sum_M = sum_M * decay_M + tl.exp2(sink_M * LOG2E - top_M)
        acc_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
        out_MD = acc_MD.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + q_row_M[:, None] * HEAD_DIM + d[None, :], out_MD, mask=q_mask)
