"""Measures a CostProfile: a few steps of known shape on the node's own executor.

It is the warm-up too: kernels are loaded and memory is touched before the node serves. Runs on
the thread that will run the engine; takes its blocks from the pool and gives them back.
"""

import time
from collections.abc import Sequence

import numpy as np

from engine.cost_model import CostProfile, StepShape, row_shape, total
from engine.executor import Draw, Executor, Row, StepPlan
from engine.sequence import SamplingParams
from kvtransfer.blocks import BlockPool
from kvtransfer.layout import KvLayout

# (rows, start, tokens per row): decode at two contexts and batch sizes, chunks at two starts.
_STEPS = ((1, 15, 1), (1, 511, 1), (8, 15, 1), (8, 255, 1), (1, 0, 64), (1, 0, 256), (1, 448, 64))
_MOST_ROWS, _BATCH_CONTEXT = 8, 256
_REPEATS = 2
_DRAW = Draw(sampling=SamplingParams(), seed=0, choice=0, position=0)


def calibrate(executor: Executor, pool: BlockPool, *, max_model_len: int) -> CostProfile:
    """A profile fitted to steps that are cut to what max_model_len and the pool allow."""
    layout = executor.layout
    per_row = layout.blocks_for(min(512, max_model_len))
    wanted = max(per_row, _MOST_ROWS * layout.blocks_for(_BATCH_CONTEXT))
    lease = pool.reserve(min(pool.counts().available, wanted))
    num_tokens = min(len(lease.block_ids) * layout.block_size, max_model_len, 512)
    pool.begin_write(lease, lease.block_ids, writer="calibration")
    try:
        # Blocks that were never written are read from one cached page of zeros.
        for first in range(0, len(lease.block_ids), per_row):
            blocks = lease.block_ids[first : first + per_row]
            length = min(num_tokens, len(blocks) * layout.block_size)
            executor.execute(StepPlan(rows=(_row(0, length, blocks),)))
        shapes, times_ms = [], []
        for num_rows, start, length in _STEPS:
            length = min(length, num_tokens)
            start = min(start, num_tokens - length)
            plan = _plan(num_rows, start, length, lease.block_ids, layout=layout)
            shapes.append(total(row_shape(start, length) for _ in range(num_rows)))
            times_ms.append(min(_time_ms(executor, plan) for _ in range(_REPEATS)))
    finally:
        pool.end_write(lease.block_ids, writer="calibration")
        pool.release(lease)
    return fit(shapes, times_ms)


def fit(shapes: list[StepShape], times_ms: list[float]) -> CostProfile:
    """Least squares with no negative coefficient, by relative error: terms that come out negative
    are dropped, the most negative first."""
    matrix = np.array(
        [
            [
                1.0,
                shape.num_decode_rows,
                shape.num_prefill_tokens,
                shape.decode_context,
                shape.prefill_context,
            ]
            for shape in shapes
        ]
    )
    weights = 1.0 / np.maximum(np.array(times_ms), 1e-3)
    kept = [column for column in range(5) if matrix[:, column].any()]
    while True:
        weighted = matrix[:, kept] * weights[:, None]
        solution = np.linalg.lstsq(weighted, np.ones(len(shapes)), rcond=None)[0]
        if solution.min() >= 0:
            break
        kept.pop(int(solution.argmin()))
    values = [0.0] * 5
    for column, value in zip(kept, solution, strict=True):
        values[column] = float(value)
    return CostProfile(
        base_ms=values[0],
        decode_row_ms=values[1],
        prefill_token_ms=values[2],
        decode_context_ms=values[3],
        prefill_context_ms=values[4],
    )


def _plan(
    num_rows: int, start: int, length: int, block_ids: Sequence[int], *, layout: KvLayout
) -> StepPlan:
    """Rows have blocks of their own, as far as there are enough: shared ones would be read from the
    processor's cache, and context seem to cost half."""
    num_blocks = layout.blocks_for(start + length)
    places = max(1, len(block_ids) // num_blocks)
    rows = []
    for index in range(num_rows):
        first = index % places * num_blocks
        rows.append(_row(start, length, block_ids[first : first + num_blocks]))
    return StepPlan(rows=tuple(rows))


def _row(start: int, length: int, block_table: Sequence[int]) -> Row:
    return Row(token_ids=[0] * length, start=start, block_table=block_table, draw=_DRAW)


def _time_ms(executor: Executor, plan: StepPlan) -> float:
    started = time.perf_counter()
    executor.execute(plan)
    return (time.perf_counter() - started) * 1e3
