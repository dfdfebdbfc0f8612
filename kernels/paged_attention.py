"""Causal attention of a packed batch over the block pool, grouped queries.

    s_tc  = cap * tanh(q_t . k_c / (sqrt(D) * cap)), without a cap q_t . k_c / sqrt(D)
    out_t = sum_c exp(s_tc) v_c / (exp(sink_n) + sum_c exp(s_tc)), without sinks no exp(sink_n)
            over keys c of t's own row with position(t) - window < c <= position(t)

kernels/attention_plan.py turns rows into index tensors once per step; paged_attention runs them per
layer. On a GPU the plan is PackedRows and the kernel is kernels/triton/paged_attention.py. Here,
two paths, by how many queries a row has:

    1 query   rows of like length are gathered into one padded batch; the query heads of a kv head
              are the rows of one small matrix, so a key is read once for all of them
    more      a row at a time, its queries in tiles that see only the keys up to their own end

A slot that the row has not written is never used, not even times zero: another request may have
left a NaN in it, and that would be this request's NaN.

Suffixes: T packed tokens, B rows of a group, C padded context, Q queries of a tile, N query heads,
H kv heads, G query heads per kv head, S block size, D head dim. The pool is block-major:
[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
"""

import torch
import torch.nn.functional as F

from kernels.attention_plan import AttentionPlan, Chunk, Group, plan_attention
from kernels.dispatch import on_gpu
from kernels.packed_rows import AttentionRow, PackedRows, unpack_rows

__all__ = ["AttentionPlan", "AttentionRow", "paged_attention", "plan_attention"]


def paged_attention(
    q_TND: torch.Tensor,
    *,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan | PackedRows,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """out_TND, new; the pool already holds K and V of the queries' own positions."""
    if on_gpu(q_TND):
        from kernels.triton import paged_attention as fast

        assert isinstance(plan, PackedRows)
        return fast.paged_attention(
            q_TND,
            pool=pool,
            layer=layer,
            rows=plan,
            window=window,
            soft_cap=soft_cap,
            sinks_N=sinks_N,
        )
    out_TND = torch.empty_like(q_TND)
    if isinstance(plan, PackedRows):
        plan = plan_attention(unpack_rows(plan, block_size=pool.shape[4]), pool=pool)
        out_TND.zero_()
    window_plan = plan.for_window(window)
    for group in window_plan.groups:
        _attend_group(q_TND, out_TND, pool, layer, group, soft_cap, sinks_N)
    for chunk in window_plan.chunks:
        _attend_chunk(q_TND, out_TND, pool, layer, chunk, soft_cap, sinks_N)
    return out_TND


def _attend_group(
    q_TND: torch.Tensor,
    out_TND: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    group: Group,
    soft_cap: float | None,
    sinks_N: torch.Tensor | None,
) -> None:
    num_rows = group.token_B.shape[0]
    num_heads, head_dim = pool.shape[3], pool.shape[5]
    kv = _gather(pool, layer, group.gather)
    if group.unused.numel():
        kv.view(-1, head_dim).index_fill_(0, group.unused, 0)
    k_BHCD, v_BHCD = kv.view(2, num_rows, num_heads, -1, head_dim)
    q_BHGD = q_TND[group.token_B].view(num_rows, num_heads, -1, head_dim)
    sinks_HG1 = None if sinks_N is None else sinks_N.view(num_heads, -1, 1)
    out_BHGD = _attend(q_BHGD, k_BHCD, v_BHCD, group.bias_B11C, soft_cap, sinks_HG1)
    out_TND[group.token_B] = out_BHGD.reshape(num_rows, -1, head_dim)


def _attend_chunk(
    q_TND: torch.Tensor,
    out_TND: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    chunk: Chunk,
    soft_cap: float | None,
    sinks_N: torch.Tensor | None,
) -> None:
    num_heads, head_dim = pool.shape[3], pool.shape[5]
    kv_2HCD = _gather(pool, layer, chunk.gather).view(2, num_heads, -1, head_dim)
    group_size = q_TND.shape[1] // num_heads
    sinks_HG11 = None if sinks_N is None else sinks_N.view(num_heads, -1, 1, 1)
    for tile in chunk.tiles:
        tokens = slice(tile.first_token, tile.first_token + tile.num_tokens)
        keys = slice(tile.first_key, tile.end_key)
        # kv heads take the batch dim, so that a key is shared by its query heads without a copy.
        k_HGCD, v_HGCD = kv_2HCD[:, :, None, keys].expand(-1, -1, group_size, -1, -1)
        q_HGQD = q_TND[tokens].view(-1, num_heads, group_size, head_dim).permute(1, 2, 0, 3)
        out_HGQD = _attend(q_HGQD, k_HGCD, v_HGCD, tile.bias_QC, soft_cap, sinks_HG11)
        out_TND[tokens] = out_HGQD.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(q k^T + bias) v over the last two dims; sinks broadcasts to [..., queries, 1]."""
    if soft_cap is None and sinks is None:
        out: torch.Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return out
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + bias
    if sinks is not None:
        # One more key, whose value is 0.
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[-2]]
    return torch.matmul(weights, v.float()).to(q.dtype)


def _gather(pool: torch.Tensor, layer: int, gather: torch.Tensor) -> torch.Tensor:
    """Blocks' K and V of one layer, copied. embedding is index_select, up to twice as fast."""
    block_size, head_dim = pool.shape[4:]
    heads_per_layer = 2 * pool.shape[3]
    return F.embedding(gather + layer * heads_per_layer, pool.view(-1, block_size * head_dim))
