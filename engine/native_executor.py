"""Steps computed by the C++ kernels in bfloat16: one native call each, without the GIL.

    StepPlan -> int32 arrays -> decoder_step -> greedy ids, and logits for what else is drawn

A prompt that is scored is computed as rows of one token, each of which draws: KV of all rows is
written before any of them attends, so these see what they would see in a chunk.

The same contract as engine/torch_executor.py, whose results differ in rounding only. Here a row's
logits are the same bits alone, in any batch and in any chunk. Runs on the engine thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine.executor import Draw, Row, StepPlan, StepResult
from engine.model_config import ModelConfig, read_model_config
from engine.native_weights import NativeWeights
from engine.rope import cos_and_sin, inverse_frequencies
from engine.sampler import draw_tokens
from engine.sequence import SamplingParams
from engine.step_result import step_result
from engine.torch_executor import check_layout
from engine.weights import Progress
from kernels.cpu.library import CPool, CStep, Runner
from kernels.cpu.packed_linear import padded
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory

# That a row's logits are wanted is all that the kernels know of a draw.
_SCORED = Draw(sampling=SamplingParams(), seed=0, choice=0, position=0)


class NativeExecutor:
    """An Executor over a model folder and the KV memory that it is given; owner of the weights."""

    def __init__(
        self,
        *,
        folder: Path,
        memory: HostMemory,
        runner: Runner,
        progress: Progress | None = None,
    ) -> None:
        """Raises ValueError for a folder that cannot be loaded and memory of another layout."""
        config = read_model_config(folder)
        check_layout(memory.layout, config, dtype="bfloat16")
        with torch.inference_mode():
            self._weights = NativeWeights(folder, config, progress=progress)
        self._config = config
        self._runner = runner
        self._layout = memory.layout
        self._pool = torch.frombuffer(memory.buffer, dtype=torch.bfloat16)
        self._c_pool = CPool(
            data=self._pool.data_ptr(),
            num_blocks=memory.num_blocks,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            block_size=memory.layout.block_size,
            head_dim=config.head_dim,
        )
        self._rope = _RopeTable(config)
        self._outputs = _Outputs(config.vocab_size)

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._config.eos_token_ids

    def execute(self, plan: StepPlan) -> StepResult:
        """Writes the KV of every row's tokens into its blocks and draws where asked.

        Raises ValueError for rows that do not fit their blocks, for token ids and blocks that do
        not exist, and for logits without a maximum.
        """
        if not plan.rows:
            return StepResult(token_ids=())
        rows = _rows_that_draw(plan.rows)
        num_draws = sum(row.draw is not None for row in rows)
        self._outputs.reserve(num_draws)
        self._compute(rows, num_draws=num_draws)
        with torch.inference_mode():
            return step_result(plan.rows, self.logits(num_draws), draw=self._draw)

    def logits(self, num_draws: int) -> torch.Tensor:
        """logits_BV of the last step, those of draws first, a view that the next overwrites."""
        return self._outputs.logits_BV[:num_draws, : self.vocab_size]

    def _compute(self, rows: Sequence[Row], *, num_draws: int) -> None:
        block_size = self._layout.block_size
        token_ids: list[int] = []
        blocks: list[int] = []
        numbers: list[int] = []
        longest = 0
        for index, row in enumerate(rows):
            num_tokens = len(row.token_ids)
            end = row.start + num_tokens
            num_blocks = -(-end // block_size)
            if not num_tokens or len(row.block_table) < num_blocks:
                raise ValueError(
                    f"row {index}: {num_tokens} tokens at {row.start} do not fit "
                    f"{len(row.block_table)} blocks of {block_size}"
                )
            numbers += (num_tokens, end, len(blocks), row.draw is not None)
            token_ids += row.token_ids
            blocks += row.block_table[:num_blocks]
            longest = max(longest, end)
        self._rope.reserve(longest)
        token_ids_T, numbers_R4, tables = _int32(token_ids), _int32(numbers), _int32(blocks)
        self._runner.decoder_step(
            self._weights.c_struct,
            CStep(
                num_tokens=len(token_ids),
                num_rows=len(rows),
                num_draws=num_draws,
                token_ids=token_ids_T.ctypes.data,
                rows=numbers_R4.ctypes.data,
                tables=tables.ctypes.data,
                cos=self._rope.cos_PF.data_ptr(),
                sin=self._rope.sin_PF.data_ptr(),
                pool=self._c_pool,
                logits=self._outputs.logits_BV.data_ptr(),
                best=self._outputs.best_B.ctypes.data,
            ),
        )

    def _draw(self, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        tokens: list[int] = self._outputs.best_B[: len(draws)].tolist()
        # What the kernel's argmax does not answer: other draws, and the error if there is no best.
        rest = [index for index, draw in enumerate(draws) if tokens[index] < 0 or not _greedy(draw)]
        if rest:
            if len(rest) < len(draws):
                logits_BV = logits_BV[rest]
            for index, token in zip(
                rest, draw_tokens(logits_BV, [draws[index] for index in rest]), strict=True
            ):
                tokens[index] = token
        return tokens


class _RopeTable:
    """Cosines and sines of all positions so far. Suffixes: P positions, F half the head dim."""

    def __init__(self, config: ModelConfig) -> None:
        self._inv_freq_F = inverse_frequencies(config.rope, config.head_dim)
        self._attention_factor = config.rope.attention_factor
        self.cos_PF = self.sin_PF = torch.empty(0)

    def reserve(self, num_positions: int) -> None:
        if num_positions <= self.cos_PF.shape[0]:
            return
        self.cos_PF, self.sin_PF = cos_and_sin(
            torch.arange(2 * num_positions),
            self._inv_freq_F,
            dtype=torch.bfloat16,
            attention_factor=self._attention_factor,
        )


class _Outputs:
    """What a step writes for the rows that draw. Suffixes: B draws, V padded vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.logits_BV = torch.empty(0, padded(vocab_size), dtype=torch.bfloat16)
        self.best_B = np.empty(0, dtype=np.int32)

    def reserve(self, num_draws: int) -> None:
        if num_draws <= len(self.best_B):
            return
        self.logits_BV = self.logits_BV.new_empty(num_draws, self.logits_BV.shape[1])
        self.best_B = np.empty(num_draws, dtype=np.int32)


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _greedy(draw: Draw) -> bool:
    if draw.sampling.temperature > 0 or draw.banned_token_ids:
        return False
    return not draw.is_adjusted


def _rows_that_draw(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows, where each scored token is one of its own: after all others, in order."""
    if all(row.scoring is None for row in rows):
        return rows
    others: list[Row] = []
    singles: list[Row] = []
    for row in rows:
        num_scored = 0 if row.scoring is None else len(row.scoring.token_ids)
        for offset, token_id in enumerate(row.token_ids[:num_scored]):
            start = row.start + offset
            singles.append(replace(row, token_ids=(token_id,), start=start, draw=_SCORED))
        if num_scored < len(row.token_ids):
            rest = row.token_ids[num_scored:]
            others.append(replace(row, token_ids=rest, start=row.start + num_scored))
    return others + singles
