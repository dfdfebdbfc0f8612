"""Decode steps at a few fixed batch sizes, each captured once as a CUDA graph and replayed.

    rows --decode_arrays--> static buffers, padded to a bucket --replay--> static logits_BV

A step at batch 1 is some hundred kernels of a few microseconds: launched one by one from Python
they take longer to launch than to run. What a graph reads and writes stays where it was when it
was captured: weights, pool, step inputs (Staging), logits. Without graphs (no GPU, or to compare)
the same buffers and the same padding go through the same forward pass.

Runs on the engine thread, under torch.inference_mode. Suffixes: B rows of a bucket, V vocabulary.
"""

from collections.abc import Sequence

import torch

from engine.batch import Batch
from engine.executor import Draw, Row
from engine.model import Decoder
from engine.sequence import SamplingParams
from engine.staging import Staging
from engine.step_arrays import batch_of, decode_arrays

# Close enough that padding costs little: a decode step is as long as its weights take to read.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)

# Kernels are compiled and libraries allocate on a first run, which must not be a captured one.
_WARM_UP_STEPS = 2

_DRAW = Draw(sampling=SamplingParams(), seed=0, choice=0, position=0)


def bucket_for(num_rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds so many rows; None if none does."""
    return next((bucket for bucket in buckets if bucket >= num_rows), None)


class DecodeGraphs:
    """Owner of the static inputs, the logits and the graphs."""

    def __init__(
        self,
        *,
        model: Decoder,
        pool: torch.Tensor,
        scratch_block: int,
        buckets: Sequence[int],
        max_blocks_per_row: int,
        captures: bool,
    ) -> None:
        """Captures all buckets, largest first, so that they share the largest one's memory."""
        self._model = model
        self._pool = pool
        self._scratch_block = scratch_block
        self._buckets = tuple(sorted(buckets))
        # Nine numbers per row, its table, and alignment.
        size_bytes = 4 * self._buckets[-1] * (9 + max_blocks_per_row) + 1024
        self._staging = Staging(model.device, size_bytes=size_bytes)
        self._logits_BV = torch.zeros(
            (self._buckets[-1], model.config.vocab_size), dtype=model.dtype, device=model.device
        )
        self._batches: dict[int, Batch] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        for bucket in reversed(self._buckets):
            self._batches[bucket] = self._static_batch(bucket)
            if captures:
                self._capture(bucket)

    def run(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """Logits of decode rows, valid until the next run; None if no bucket holds them."""
        bucket = bucket_for(len(rows), self._buckets)
        if bucket is None:
            return None
        arrays = decode_arrays(
            rows,
            block_size=self._pool.shape[4],
            bucket=bucket,
            scratch_block=self._scratch_block,
        ).to_list()
        if not self._staging.fits(arrays):
            return None
        self._staging.upload(arrays)
        graph = self._graphs.get(bucket)
        if graph is None:
            self._forward(bucket)
        else:
            graph.replay()
        return self._logits_BV[: len(rows)]

    def _static_batch(self, bucket: int) -> Batch:
        """Padding rows and one real row, of position 0, in the scratch block."""
        row = Row(token_ids=(0,), start=0, block_table=(self._scratch_block,), draw=_DRAW)
        arrays = decode_arrays(
            (row,),
            block_size=self._pool.shape[4],
            bucket=bucket,
            scratch_block=self._scratch_block,
        )
        views = self._staging.upload(arrays.to_list())
        # Tables of later steps are longer: the view must reach to the buffer's end.
        views[-1] = self._staging.rest_of(views[-1])
        return batch_of(arrays, views, (_DRAW,) * bucket)

    def _forward(self, bucket: int) -> None:
        logits_BV = self._model.forward(self._batches[bucket], pool=self._pool)
        self._logits_BV[:bucket].copy_(logits_BV)

    def _capture(self, bucket: int) -> None:
        for _ in range(_WARM_UP_STEPS):
            self._forward(bucket)
        torch.cuda.synchronize(self._model.device)
        graph = torch.cuda.CUDAGraph()
        memory = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=memory):
            self._forward(bucket)
        self._graphs[bucket] = graph
