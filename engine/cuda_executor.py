"""Steps computed by a model on a GPU.

    model = load_model(folder, dtype="bfloat16", device="cuda")
    memory = DeviceMemory(layout, num_blocks, device=model.device)
    executor = CudaExecutor(model=model, memory=memory, max_model_len=...)

    decode rows only     DecodeGraphs: padded to a bucket, replayed
    chunks too           Staging, then the same forward pass, launched op by op
    -> DeviceSampler: ids to the host, the only wait of a step

When execute returns, the step's KV is in the pool for any stream to read. Runs on the engine
thread. The device may be a CPU, where nothing is captured: tests do that.
"""

from collections.abc import Sequence

import torch

from engine.decode_graphs import BUCKETS, DecodeGraphs
from engine.device_sampler import DeviceSampler
from engine.executor import Row, StepPlan, StepResult
from engine.model import Decoder
from engine.staging import Staging
from engine.step_arrays import batch_of, is_decode, step_arrays
from engine.step_result import step_result
from engine.torch_executor import check_layout
from kvtransfer.device_memory import DeviceMemory
from kvtransfer.layout import KvLayout


class CudaExecutor:
    """An Executor over a model and the KV memory that it is given; owner of neither."""

    def __init__(
        self,
        *,
        model: Decoder,
        memory: DeviceMemory,
        max_model_len: int,
        buckets: Sequence[int] = BUCKETS,
        captures: bool = True,
    ) -> None:
        """Compiles and captures, for seconds. Raises ValueError if the layout is another model's.

        buckets are the batch sizes of captured decode steps; captures False runs them uncaptured.
        """
        check_layout(memory.layout, model.config, dtype=str(model.dtype).removeprefix("torch."))
        self._model = model
        self._memory = memory
        self._staging = Staging(model.device, size_bytes=1 << 20)
        self._sampler = DeviceSampler(model.device)
        with torch.inference_mode():
            self._decode = DecodeGraphs(
                model=model,
                pool=memory.pool,
                scratch_block=memory.scratch_block,
                buckets=buckets,
                max_blocks_per_row=memory.layout.blocks_for(max_model_len + 1),
                captures=captures and model.device.type == "cuda",
            )

    @property
    def layout(self) -> KvLayout:
        return self._memory.layout

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._model.config.eos_token_ids

    def execute(self, plan: StepPlan) -> StepResult:
        """Writes the KV of every row's tokens into its blocks and draws where asked.

        Raises ValueError for rows that do not fit their blocks and for logits without a maximum.
        """
        if not plan.rows:
            return StepResult(token_ids=())
        with torch.inference_mode():
            logits_BV = self._logits(plan.rows)
            result = step_result(plan.rows, logits_BV, draw=self._sampler.draw)
            if not logits_BV.shape[0] and self._model.device.type == "cuda":
                torch.cuda.current_stream(self._model.device).synchronize()
        return result

    def _logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """logits_BV of the rows that draw, then of the tokens that are scored."""
        logits_BV = self._decode.run(rows) if is_decode(rows) else None
        if logits_BV is not None:
            return logits_BV
        arrays = step_arrays(rows, block_size=self._memory.layout.block_size)
        self._staging.reserve(arrays.to_list())
        views = self._staging.upload(arrays.to_list())
        draws = tuple(row.draw for row in rows if row.draw is not None)
        return self._model.forward(batch_of(arrays, views, draws), pool=self._memory.pool)
