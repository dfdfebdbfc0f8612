"""A step's numbers as flat int32 arrays, ready for one copy to the device.

    StepPlan --step_arrays / decode_arrays--> StepArrays --Staging--> Batch of device views

decode_arrays pads a pure decode step to a bucket: a padding row has one token, attends to nothing
and writes its KV into a scratch block that no sequence owns. All shapes but that of blocks, which
comes last, then depend on the bucket alone.

Suffixes: T packed tokens, R attention rows, B rows that draw and then tokens that are scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.batch import Batch
from engine.executor import Draw, Row
from engine.staging import Array
from kernels.packed_rows import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """The fields of Batch and PackedRows, on the host."""

    token_ids_T: Array
    positions_T: Array
    block_T: Array
    slot_T: Array
    last_B: Array
    first_token_R: Array
    num_tokens_R: Array
    context_R: Array
    table_start_R: Array
    blocks: Array
    num_decode: int
    max_chunk: int

    def to_list(self) -> list[Array]:
        """The arrays, in the order that batch_of expects."""
        return [
            self.token_ids_T,
            self.positions_T,
            self.block_T,
            self.slot_T,
            self.last_B,
            self.first_token_R,
            self.num_tokens_R,
            self.context_R,
            self.table_start_R,
            self.blocks,
        ]


def is_decode(rows: Sequence[Row]) -> bool:
    """Whether every row is one token that is drawn from: what a bucket can hold."""
    return all(len(row.token_ids) == 1 and row.draw is not None for row in rows)


def step_arrays(rows: Sequence[Row], *, block_size: int) -> StepArrays:
    """Any rows. Raises ValueError for a row that its blocks do not cover."""
    length_R = _int32([len(row.token_ids) for row in rows])
    start_R = _int32([row.start for row in rows])
    context_R = start_R + length_R
    num_blocks_R = -(-context_R // block_size)
    for index, row in enumerate(rows):
        if not row.token_ids or len(row.block_table) < num_blocks_R[index]:
            raise ValueError(
                f"row {index}: {len(row.token_ids)} tokens at {row.start} do not fit "
                f"{len(row.block_table)} blocks of {block_size}"
            )
    tables = (row.block_table[:num] for row, num in zip(rows, num_blocks_R.tolist(), strict=True))
    blocks = np.fromiter(chain.from_iterable(tables), np.int32, count=int(num_blocks_R.sum()))
    table_start_R = _starts(num_blocks_R)
    first_token_R = _starts(length_R)
    num_tokens = int(length_R.sum())
    positions_T = np.arange(num_tokens, dtype=np.int32)
    positions_T += np.repeat(start_R - first_token_R, length_R)
    block_T = blocks[np.repeat(table_start_R, length_R) + positions_T // block_size]
    drawing = [index for index, row in enumerate(rows) if row.draw is not None]
    # Rows of one query first.
    order = np.argsort(length_R != 1, kind="stable")
    return StepArrays(
        token_ids_T=np.fromiter(
            chain.from_iterable(row.token_ids for row in rows), np.int32, count=num_tokens
        ),
        positions_T=positions_T,
        block_T=block_T,
        slot_T=positions_T % block_size,
        last_B=np.concatenate(
            ((first_token_R + length_R - 1)[drawing], _scored(rows, first_token_R))
        ),
        first_token_R=first_token_R[order],
        num_tokens_R=length_R[order],
        context_R=context_R[order],
        table_start_R=table_start_R[order],
        blocks=blocks,
        num_decode=int((length_R == 1).sum()),
        max_chunk=int(length_R.max()),
    )


def decode_arrays(
    rows: Sequence[Row], *, block_size: int, bucket: int, scratch_block: int
) -> StepArrays:
    """Rows of which is_decode holds, padded to bucket of them. Raises ValueError as above."""
    arrays = step_arrays(rows, block_size=block_size)
    padding = bucket - len(rows)

    def padded(array: Array, value: int = 0) -> Array:
        return np.concatenate((array, np.full(padding, value, np.int32)))

    every = np.arange(bucket, dtype=np.int32)
    return StepArrays(
        token_ids_T=padded(arrays.token_ids_T),
        positions_T=padded(arrays.positions_T),
        block_T=padded(arrays.block_T, scratch_block),
        slot_T=padded(arrays.slot_T),
        last_B=every,
        first_token_R=every,
        num_tokens_R=padded(arrays.num_tokens_R, 1),
        context_R=padded(arrays.context_R, 0),
        table_start_R=padded(arrays.table_start_R),
        blocks=arrays.blocks,
        num_decode=bucket,
        max_chunk=1,
    )


def batch_of(arrays: StepArrays, views: Sequence[torch.Tensor], draws: tuple[Draw, ...]) -> Batch:
    """The batch over device views of arrays.to_list()."""
    num_scored = len(arrays.last_B) - len(draws)
    token_ids_T, positions_T, block_T, slot_T, last_B, *row_views, blocks = views
    first_token_R, num_tokens_R, context_R, table_start_R = row_views
    return Batch(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        block_T=block_T,
        slot_T=slot_T,
        attention=PackedRows(
            first_token_R=first_token_R,
            num_tokens_R=num_tokens_R,
            context_R=context_R,
            table_start_R=table_start_R,
            blocks=blocks,
            num_decode=arrays.num_decode,
            max_chunk=arrays.max_chunk,
        ),
        last_B=last_B,
        draws=(*draws, *(None for _ in range(num_scored))),
    )


def _scored(rows: Sequence[Row], first_token_R: Array) -> Array:
    """The packed tokens that are scored."""
    spans = [
        np.arange(first, first + len(row.scoring.token_ids), dtype=np.int32)
        for row, first in zip(rows, first_token_R.tolist(), strict=True)
        if row.scoring is not None
    ]
    return np.concatenate(spans) if spans else _int32(())


def _int32(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int32)


def _starts(lengths: Array) -> Array:
    """Where each of these begins when they are laid end to end."""
    starts: Array = (np.cumsum(lengths) - lengths).astype(np.int32)
    return starts
