"""Steps computed by a model, in torch, on the host.

    model = load_model(folder, dtype="bfloat16")
    layout = kv_layout(model.config, model_name=..., digest=..., dtype="bfloat16", block_size=16)
    executor = TorchExecutor(model=model, memory=HostMemory(layout, num_blocks))

The pool tensor is a view of the memory's buffer: what a lane writes there, attention reads.
Runs on the engine thread. torch's thread count belongs to the process and is set in __main__.
"""

import torch

from engine.batch import pack
from engine.executor import StepPlan, StepResult
from engine.model import DTYPES, Decoder
from engine.model_config import ModelConfig
from engine.sampler import draw_tokens
from engine.step_result import step_result
from kvtransfer.layout import DEFAULT_INNER_ORDER, KvLayout
from kvtransfer.memory import HostMemory


class TorchExecutor:
    """An Executor over a model and the KV memory that it is given; owner of neither."""

    def __init__(self, *, model: Decoder, memory: HostMemory) -> None:
        """Raises ValueError if the memory's layout is not this model's."""
        dtype = next(name for name, dtype in DTYPES.items() if dtype == model.dtype)
        check_layout(memory.layout, model.config, dtype=dtype)
        self._model = model
        self._layout = memory.layout
        shape = (memory.num_blocks, *memory.layout.block_shape)
        self._pool = torch.frombuffer(memory.buffer, dtype=model.dtype).view(shape)

    @property
    def layout(self) -> KvLayout:
        return self._layout

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
            batch = pack(plan, pool=self._pool)
            logits_BV = self._model.forward(batch, pool=self._pool)
            return step_result(plan.rows, logits_BV, draw=draw_tokens)


def check_layout(layout: KvLayout, config: ModelConfig, *, dtype: str) -> None:
    """Raises ValueError, naming the field, if the layout is not that of a model in dtype."""
    expected = {
        "dtype": dtype,
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "head_start": 0,
        "inner_order": DEFAULT_INNER_ORDER,
    }
    for name, value in expected.items():
        if getattr(layout, name) != value:
            raise ValueError(f"layout: {name} {getattr(layout, name)!r} is not {value!r}")
