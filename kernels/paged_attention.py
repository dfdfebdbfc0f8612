"""Causal attention of a packed batch over the block pool, grouped queries.

    out_t = softmax(q_t . K^T / sqrt(D)) V,  K and V of the token's own row at positions <= its own

plan_attention turns rows into index tensors once per step; paged_attention runs them per layer.
Two paths, by how many queries a row has:

    1 query   rows of like length are gathered into one padded batch; the query heads of a kv head
              are the rows of one small matrix, so a key is read once for all of them
    more      a row at a time, its queries in tiles that see only the keys up to their own end

A slot that the row has not written is never used, not even times zero: another request may have
left a NaN in it, and that would be this request's NaN.

Suffixes: T packed tokens, B rows of a group, C padded context, Q queries of a tile, N query heads,
H kv heads, G query heads per kv head, S block size, D head dim. The pool is block-major:
[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# A group's gathered K and V stay in a CPU's L2 between the copy and the two products.
_GROUP_BYTES = 1 << 20

# Queries per tile: measured best of 32 to 256 at 1024 tokens, float32 and bfloat16.
_TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """One sequence's queries: packed tokens first_token onwards, at the end of context_len keys.

    block_table covers context_len positions; what it has beyond is not looked at.
    """

    first_token: int
    num_tokens: int
    context_len: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Rows with one query. Indices are of layer 0; unused names gathered slots to be zeroed."""

    token_B: torch.Tensor
    gather: torch.Tensor
    unused: torch.Tensor
    bias_B11C: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    first_token: int
    num_tokens: int
    num_keys: int
    bias_QC: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    gather: torch.Tensor
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """What paged_attention reads, for every layer of one step and one pool."""

    groups: tuple[_Group, ...]
    chunks: tuple[_Chunk, ...]


def plan_attention(rows: Sequence[AttentionRow], *, pool: torch.Tensor) -> AttentionPlan:
    """Index tensors for rows over a pool of this shape and dtype."""
    singles = sorted((row for row in rows if row.num_tokens == 1), key=lambda row: row.context_len)
    return AttentionPlan(
        groups=tuple(_plan_group(group, pool) for group in _split(singles, pool)),
        chunks=tuple(_plan_chunk(row, pool) for row in rows if row.num_tokens > 1),
    )


def paged_attention(
    q_TND: torch.Tensor, *, pool: torch.Tensor, layer: int, plan: AttentionPlan
) -> torch.Tensor:
    """out_TND, new; the pool already holds K and V of the queries' own positions."""
    out_TND = torch.empty_like(q_TND)
    for group in plan.groups:
        _attend_group(q_TND, out_TND, pool, layer, group)
    for chunk in plan.chunks:
        _attend_chunk(q_TND, out_TND, pool, layer, chunk)
    return out_TND


def _attend_group(
    q_TND: torch.Tensor, out_TND: torch.Tensor, pool: torch.Tensor, layer: int, group: _Group
) -> None:
    num_rows = group.token_B.shape[0]
    num_heads, head_dim = pool.shape[3], pool.shape[5]
    kv = _gather(pool, layer, group.gather)
    if group.unused.numel():
        kv.view(-1, head_dim).index_fill_(0, group.unused, 0)
    k_BHCD, v_BHCD = kv.view(2, num_rows, num_heads, -1, head_dim)
    q_BHGD = q_TND[group.token_B].view(num_rows, num_heads, -1, head_dim)
    out_BHGD = F.scaled_dot_product_attention(q_BHGD, k_BHCD, v_BHCD, attn_mask=group.bias_B11C)
    out_TND[group.token_B] = out_BHGD.reshape(num_rows, -1, head_dim)


def _attend_chunk(
    q_TND: torch.Tensor, out_TND: torch.Tensor, pool: torch.Tensor, layer: int, chunk: _Chunk
) -> None:
    num_heads, head_dim = pool.shape[3], pool.shape[5]
    kv_2HCD = _gather(pool, layer, chunk.gather).view(2, num_heads, -1, head_dim)
    group_size = q_TND.shape[1] // num_heads
    for tile in chunk.tiles:
        tokens = slice(tile.first_token, tile.first_token + tile.num_tokens)
        # kv heads take the batch dim, so that a key is shared by its query heads without a copy.
        k_HGCD, v_HGCD = kv_2HCD[:, :, None, : tile.num_keys].expand(-1, -1, group_size, -1, -1)
        q_HGQD = q_TND[tokens].view(-1, num_heads, group_size, head_dim).permute(1, 2, 0, 3)
        out_HGQD = F.scaled_dot_product_attention(q_HGQD, k_HGCD, v_HGCD, attn_mask=tile.bias_QC)
        out_TND[tokens] = out_HGQD.permute(2, 0, 1, 3).flatten(1, 2)


def _gather(pool: torch.Tensor, layer: int, gather: torch.Tensor) -> torch.Tensor:
    """Blocks' K and V of one layer, copied. embedding is index_select, up to twice as fast."""
    block_size, head_dim = pool.shape[4:]
    heads_per_layer = 2 * pool.shape[3]
    return F.embedding(gather + layer * heads_per_layer, pool.view(-1, block_size * head_dim))


def _gather_index(tables: Sequence[Sequence[int]], pool: torch.Tensor) -> torch.Tensor:
    """Rows of the pool seen as [-1, S * D], in the order [K or V, table, kv head, block]."""
    num_layers, num_heads = pool.shape[1], pool.shape[3]
    table_BM = torch.tensor(tables, dtype=torch.int64)
    kv = torch.arange(2).view(2, 1, 1, 1)
    head = torch.arange(num_heads).view(1, 1, num_heads, 1)
    index = (table_BM[None, :, None, :] * num_layers * 2 + kv) * num_heads + head
    return index.flatten().to(pool.device)


def _split(rows: Sequence[AttentionRow], pool: torch.Tensor) -> list[list[AttentionRow]]:
    """Rows, shortest first, into groups whose padded K and V stay within _GROUP_BYTES."""
    token_bytes = 2 * pool.shape[3] * pool.shape[5] * pool.element_size()
    groups: list[list[AttentionRow]] = []
    for row in rows:
        padded_bytes = row.context_len * token_bytes
        if groups and (len(groups[-1]) + 1) * padded_bytes <= _GROUP_BYTES:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _plan_group(rows: Sequence[AttentionRow], pool: torch.Tensor) -> _Group:
    num_heads, block_size = pool.shape[3], pool.shape[4]
    num_blocks = -(-rows[-1].context_len // block_size)
    padded_len = num_blocks * block_size
    # Padding repeats the row's first block: any block does, its slots are zeroed and masked.
    tables = [_padded(row.block_table[:num_blocks], num_blocks) for row in rows]
    context_B = torch.tensor([row.context_len for row in rows])
    is_unused_BC = torch.arange(padded_len)[None] >= context_B[:, None]
    bias_BC = torch.zeros(is_unused_BC.shape).masked_fill_(is_unused_BC, float("-inf"))
    unused = is_unused_BC[None, :, None].expand(2, -1, num_heads, -1).flatten().nonzero()
    return _Group(
        token_B=torch.tensor([row.first_token for row in rows], device=pool.device),
        gather=_gather_index(tables, pool),
        unused=unused.flatten().to(pool.device),
        bias_B11C=bias_BC[:, None, None].to(pool),
    )


def _padded(table: Sequence[int], num_blocks: int) -> list[int]:
    return [*table, *(table[0] for _ in range(num_blocks - len(table)))]


def _plan_chunk(row: AttentionRow, pool: torch.Tensor) -> _Chunk:
    start = row.context_len - row.num_tokens
    num_blocks = -(-row.context_len // pool.shape[4])
    tiles = []
    for offset in range(0, row.num_tokens, _TILE):
        num_tokens = min(_TILE, row.num_tokens - offset)
        num_keys = start + offset + num_tokens
        is_later_QC = torch.ones(num_tokens, num_keys).triu(num_keys - num_tokens + 1)
        bias_QC = torch.zeros(is_later_QC.shape).masked_fill_(is_later_QC.bool(), float("-inf"))
        tiles.append(
            _Tile(
                first_token=row.first_token + offset,
                num_tokens=num_tokens,
                num_keys=num_keys,
                bias_QC=bias_QC.to(pool),
            )
        )
    gather = _gather_index([row.block_table[:num_blocks]], pool)
    return _Chunk(gather=gather, tiles=tuple(tiles))
