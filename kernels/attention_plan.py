"""Index tensors of a step's attention rows, for the torch implementation of paged attention.

    rows --plan_attention--> AttentionPlan --for_window--> WindowPlan{groups, chunks}

    groups   rows of one query, of like length, gathered into one padded batch
    chunks   rows of more, one at a time, their queries in tiles

Suffixes: B rows of a group, C padded context, Q queries of a tile. The pool is block-major:
[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.packed_rows import AttentionRow

# A group's gathered K and V stay in a CPU's L2 between the copy and the two products.
_GROUP_BYTES = 1 << 20

# Queries per tile: measured best of 32 to 256 at 1024 tokens, float32 and bfloat16.
_TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows with one query. Indices are of layer 0; unused names gathered slots to be zeroed."""

    token_B: torch.Tensor
    gather: torch.Tensor
    unused: torch.Tensor
    bias_B11C: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Queries, and the range of gathered keys that some of them see."""

    first_token: int
    num_tokens: int
    first_key: int
    end_key: int
    bias_QC: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    gather: torch.Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """Index tensors of all rows for layers of one window."""

    groups: tuple[Group, ...]
    chunks: tuple[Chunk, ...]


class AttentionPlan:
    """What paged_attention reads, for every layer of one step and one pool.

    Index tensors depend on a layer's window, and are made when the first such layer asks.
    """

    def __init__(self, rows: Sequence[AttentionRow], pool: torch.Tensor) -> None:
        self._rows = rows
        self._pool = pool
        self._plans: dict[int | None, WindowPlan] = {}

    def for_window(self, window: int | None) -> WindowPlan:
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = _plan_window(self._rows, self._pool, window)
        return plan


def plan_attention(rows: Sequence[AttentionRow], *, pool: torch.Tensor) -> AttentionPlan:
    """Index tensors for rows over a pool of this shape and dtype."""
    return AttentionPlan(rows, pool)


def _gather_index(tables: Sequence[Sequence[int]], pool: torch.Tensor) -> torch.Tensor:
    """Rows of the pool seen as [-1, S * D], in the order [K or V, table, kv head, block]."""
    num_layers, num_heads = pool.shape[1], pool.shape[3]
    table_BM = torch.tensor(tables, dtype=torch.int64)
    kv = torch.arange(2).view(2, 1, 1, 1)
    head = torch.arange(num_heads).view(1, 1, num_heads, 1)
    index = (table_BM[None, :, None, :] * num_layers * 2 + kv) * num_heads + head
    return index.flatten()


def _plan_window(
    rows: Sequence[AttentionRow], pool: torch.Tensor, window: int | None
) -> WindowPlan:
    singles = sorted(
        (row for row in rows if row.num_tokens == 1),
        key=lambda row: row.context_len - _first_key(row, window),
    )
    return WindowPlan(
        groups=tuple(_plan_group(group, pool, window) for group in _split(singles, pool, window)),
        chunks=tuple(_plan_chunk(row, pool, window) for row in rows if row.num_tokens > 1),
    )


def _first_key(row: AttentionRow, window: int | None, query: int = 0) -> int:
    """The first position that a query of the row sees."""
    position = row.context_len - row.num_tokens + query
    return 0 if window is None else max(0, position - window + 1)


def _split(
    rows: Sequence[AttentionRow], pool: torch.Tensor, window: int | None
) -> list[list[AttentionRow]]:
    """Rows, shortest first, into groups whose padded K and V stay within _GROUP_BYTES."""
    token_bytes = 2 * pool.shape[3] * pool.shape[5] * pool.element_size()
    groups: list[list[AttentionRow]] = []
    for row in rows:
        padded_bytes = (row.context_len - _first_key(row, window)) * token_bytes
        if groups and (len(groups[-1]) + 1) * padded_bytes <= _GROUP_BYTES:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _plan_group(rows: Sequence[AttentionRow], pool: torch.Tensor, window: int | None) -> Group:
    num_heads, block_size = pool.shape[3], pool.shape[4]
    # A window may begin inside a block: what is before it there is gathered, and masked.
    first_blocks = [_first_key(row, window) // block_size for row in rows]
    tables = [
        row.block_table[first : -(-row.context_len // block_size)]
        for row, first in zip(rows, first_blocks, strict=True)
    ]
    num_blocks = max(map(len, tables))
    first_B = torch.tensor([block * block_size for block in first_blocks])
    position_BC = first_B[:, None] + torch.arange(num_blocks * block_size)
    begin_B = torch.tensor([_first_key(row, window) for row in rows])
    context_B = torch.tensor([row.context_len for row in rows])
    is_unused_BC = (position_BC < begin_B[:, None]) | (position_BC >= context_B[:, None])
    bias_BC = torch.zeros(is_unused_BC.shape).masked_fill_(is_unused_BC, float("-inf"))
    unused = is_unused_BC[None, :, None].expand(2, -1, num_heads, -1).flatten().nonzero()
    return Group(
        token_B=torch.tensor([row.first_token for row in rows]),
        gather=_gather_index([_padded(table, num_blocks) for table in tables], pool),
        unused=unused.flatten(),
        bias_B11C=bias_BC[:, None, None].to(pool.dtype),
    )


def _padded(table: Sequence[int], num_blocks: int) -> list[int]:
    """Padding repeats the first block: any block does, its slots are zeroed and masked."""
    return [*table, *(table[0] for _ in range(num_blocks - len(table)))]


def _plan_chunk(row: AttentionRow, pool: torch.Tensor, window: int | None) -> Chunk:
    block_size = pool.shape[4]
    start = row.context_len - row.num_tokens
    first_block = _first_key(row, window) // block_size
    gathered = first_block * block_size
    tiles = []
    for offset in range(0, row.num_tokens, _TILE):
        num_tokens = min(_TILE, row.num_tokens - offset)
        first_key = _first_key(row, window, offset)
        end_key = start + offset + num_tokens
        position_Q1 = torch.arange(start + offset, end_key)[:, None]
        key_C = torch.arange(first_key, end_key)
        is_hidden_QC = key_C > position_Q1
        if window is not None:
            is_hidden_QC |= key_C <= position_Q1 - window
        bias_QC = torch.zeros(is_hidden_QC.shape).masked_fill_(is_hidden_QC, float("-inf"))
        tiles.append(
            Tile(
                first_token=row.first_token + offset,
                num_tokens=num_tokens,
                first_key=first_key - gathered,
                end_key=end_key - gathered,
                bias_QC=bias_QC.to(pool.dtype),
            )
        )
    gather = _gather_index([row.block_table[first_block : -(-row.context_len // block_size)]], pool)
    return Chunk(gather=gather, tiles=tuple(tiles))
