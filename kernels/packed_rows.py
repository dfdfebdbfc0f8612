"""A step's attention rows: as the scheduler thinks of them, and as a GPU kernel reads them.

    AttentionRow   one row, its block table a sequence of its own
    PackedRows     all rows, int32 tensors on the device, tables end to end:

    row r: queries are packed tokens first_token_R[r] onwards, num_tokens_R[r] of them, at the end
           of context_R[r] keys; its block table is blocks[table_start_R[r]:]

Rows of one query come first: they are attended by splitting keys, the others by tiling queries.
Suffixes: R rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch


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
class PackedRows:
    """num_decode rows of one query, then rows of up to max_chunk. Tensors may be views of buffers
    that are refilled for the next step: captured steps read them anew.

    A decode row of context 0 attends to nothing and gives 0: padding of a captured batch.
    """

    first_token_R: torch.Tensor
    num_tokens_R: torch.Tensor
    context_R: torch.Tensor
    table_start_R: torch.Tensor
    blocks: torch.Tensor
    num_decode: int
    max_chunk: int

    @property
    def num_rows(self) -> int:
        return self.context_R.shape[0]


def pack_rows(rows: Sequence[AttentionRow], *, block_size: int, device: torch.device) -> PackedRows:
    """The rows, those of one query first, in tensors of their own. engine/step_inputs.py does the
    same into buffers that last."""
    ordered = sorted(rows, key=lambda row: row.num_tokens != 1)
    tables = [row.block_table[: -(-row.context_len // block_size)] for row in ordered]

    def int32(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PackedRows(
        first_token_R=int32([row.first_token for row in ordered]),
        num_tokens_R=int32([row.num_tokens for row in ordered]),
        context_R=int32([row.context_len for row in ordered]),
        table_start_R=int32([0, *accumulate(map(len, tables))][: len(tables)]),
        blocks=int32(list(chain.from_iterable(tables))),
        num_decode=sum(row.num_tokens == 1 for row in rows),
        max_chunk=max((row.num_tokens for row in rows), default=0),
    )


def unpack_rows(packed: PackedRows, *, block_size: int) -> list[AttentionRow]:
    """The rows that attend to something. Waits for the device."""
    blocks = packed.blocks.tolist()
    numbers = zip(
        packed.first_token_R.tolist(),
        packed.num_tokens_R.tolist(),
        packed.context_R.tolist(),
        packed.table_start_R.tolist(),
        strict=True,
    )
    return [
        AttentionRow(
            first_token=first_token,
            num_tokens=num_tokens,
            context_len=context_len,
            block_table=blocks[start : start - (-context_len // block_size)],
        )
        for first_token, num_tokens, context_len, start in numbers
        if num_tokens and context_len
    ]
