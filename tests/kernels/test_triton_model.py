"""A whole model on interpreted Triton kernels: the step loop as a GPU runs it, but for graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cuda_executor import CudaExecutor
from engine.executor import Draw, Row, StepPlan
from engine.model import load_model
from engine.model_config import kv_layout
from engine.sequence import SamplingParams
from kvtransfer.device_memory import DeviceMemory
from tests.models import make_tiny_model, reference_greedy, reference_model

pytest.importorskip("triton")

PROMPT = [(7 * index) % 259 for index in range(19)]


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        pytest.param("qwen3", {}, marks=pytest.mark.slow),
        ("mistral", {"sliding_window": 6}),
    ],
)
def test_tokens_are_those_of_transformers(
    architecture: str,
    overrides: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for op in ("block_copy", "paged_attention", "rms_norm", "rope_and_cache_write", "silu_and_mul"):
        monkeypatch.setattr(f"kernels.{op}.on_gpu", lambda x: True)
    # A small GPU: the interpreter runs the programs of a large one one after another.
    monkeypatch.setattr("kernels.triton.paged_attention._DEFAULT_PROCESSORS", 4)
    folder = make_tiny_model(tmp_path / "m", architecture, num_hidden_layers=2, **overrides)
    model = load_model(folder, dtype="float32")
    layout = kv_layout(model.config, model_name="m", digest="d", dtype="float32", block_size=5)
    memory = DeviceMemory(layout, 12, device=torch.device("cpu"))
    memory.pool.fill_(float("nan"))
    executor = CudaExecutor(model=model, memory=memory, max_model_len=40, buckets=(2,))
    tokens, start, table = list(PROMPT), 0, (7, 2, 9, 4, 0)
    for end in (8, 19, 20, 21):
        draw = Draw(sampling=SamplingParams(), seed=0, choice=0, position=end)
        row = Row(
            token_ids=tokens[start:end],
            start=start,
            block_table=table,
            draw=draw if end >= len(PROMPT) else None,
        )
        (token_id,) = executor.execute(StepPlan(rows=(row,))).token_ids
        tokens += [] if token_id is None else [token_id]
        start = end
    expected = reference_greedy(reference_model(folder), PROMPT, num_tokens=3)
    assert tokens[len(PROMPT) :] == expected
