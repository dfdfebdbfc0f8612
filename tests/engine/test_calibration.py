"""A fitted profile predicts what it was fitted to, and has no negative coefficient."""

from pathlib import Path

import pytest

from engine.calibration import calibrate, fit
from engine.catalog import resolve_model
from engine.cost_model import CostProfile, chunk_shape, decode_shape, total
from engine.emulated_executor import EmulatedExecutor, emulated_layout
from kvtransfer.blocks import BlockPool
from kvtransfer.memory import HostMemory

TRUE = CostProfile(
    base_ms=3.0,
    decode_row_ms=0.5,
    prefill_token_ms=0.8,
    decode_context_ms=0.002,
    prefill_context_ms=0.0005,
)
SHAPES = [
    decode_shape(15),
    decode_shape(511),
    total([decode_shape(15)] * 8),
    total([decode_shape(255)] * 8),
    chunk_shape(0, 64),
    chunk_shape(0, 256),
    chunk_shape(448, 64),
]


def test_exact_times_give_the_exact_profile():
    fitted = fit(SHAPES, [TRUE.predict_ms(shape) for shape in SHAPES])
    for shape in SHAPES:
        assert fitted.predict_ms(shape) == pytest.approx(TRUE.predict_ms(shape), rel=1e-6)


def test_noise_that_asks_for_a_negative_cost_gets_zero():
    times_ms = [TRUE.predict_ms(shape) for shape in SHAPES]
    times_ms[1] = times_ms[0] / 2
    fitted = fit(SHAPES, times_ms)
    assert min(fitted.base_ms, fitted.decode_context_ms, fitted.prefill_context_ms) >= 0


@pytest.mark.parametrize("max_model_len", [1, 8, 300, 4000])
def test_calibration_fits_any_context_and_gives_its_blocks_back(max_model_len: int):
    folder: Path = resolve_model("emulated", allow_download=False).folder
    memory = HostMemory(emulated_layout(model="emulated", block_size=16), 40)
    pool = BlockPool(40)
    executor = EmulatedExecutor(folder=folder, memory=memory)
    fitted = calibrate(executor, pool, max_model_len=max_model_len)
    assert fitted.predict_ms(decode_shape(0)) > 0
    assert pool.counts().available == 40


def test_rows_of_a_batch_read_blocks_of_their_own():
    plans = []

    class Recording(EmulatedExecutor):
        def execute(self, plan):
            plans.append(plan)
            return super().execute(plan)

    folder: Path = resolve_model("emulated", allow_download=False).folder
    memory = HostMemory(emulated_layout(model="emulated", block_size=16), 200)
    calibrate(Recording(folder=folder, memory=memory), BlockPool(200), max_model_len=4000)
    batches = [plan.rows for plan in plans if len(plan.rows) == 8]
    assert {row.start for rows in batches for row in rows} == {15, 255}
    for rows in batches:
        blocks = [block for row in rows for block in row.block_table]
        assert len(blocks) == len(set(blocks)) == 8 * -(-(rows[0].start + 1) // 16)
