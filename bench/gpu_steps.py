"""gpu_check's step loop: tokens/s of CudaExecutor on random weights, with and without graphs.

A decode step's limit is reading weights and KV once at the measured copy bandwidth; a prefill
step's is its products at the measured matmul rate. Executors are driven as the engine drives them:
block tables and draws in, token ids out, once per step.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.gpu_report import Report
from bench.random_model import SHAPES, random_model, weight_bytes
from engine.cuda_executor import CudaExecutor
from engine.executor import Draw, Row, StepPlan
from engine.model import Decoder
from engine.model_config import kv_layout
from engine.sequence import SamplingParams
from kvtransfer.device_memory import DeviceMemory

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    models: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    chunk: int


FULL = StepSizes(
    models=("qwen3-0.6b", "llama-3-8b"), batches=(1, 4, 16, 64, 256), context=1024, chunk=2048
)
TINY = StepSizes(models=("tiny",), batches=(1, 3), context=40, chunk=33)


def check_steps(report: Report, sizes: StepSizes, device: torch.device) -> None:
    for name in sizes.models:
        if report.is_late("step", name):
            continue
        with report.check("step", name):
            _check_model(report, name, sizes, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _check_model(report: Report, name: str, sizes: StepSizes, device: torch.device) -> None:
    model = random_model(name, device, dtype=torch.bfloat16)
    layout = kv_layout(
        model.config, model_name=name, digest="", dtype="bfloat16", block_size=BLOCK_SIZE
    )
    blocks_per_row = layout.blocks_for(sizes.context + 1)
    num_blocks = max(sizes.batches[-1] * blocks_per_row, layout.blocks_for(sizes.chunk + 1))
    memory = DeviceMemory(layout, num_blocks, device=device)
    memory.pool.normal_()
    for captures in (False, True) if device.type == "cuda" else (False,):
        executor = CudaExecutor(
            model=model,
            memory=memory,
            max_model_len=SHAPES[name]["max_position_embeddings"],
            buckets=sizes.batches,
            captures=captures,
        )
        for batch in sizes.batches:
            mode = "graph" if captures else "eager"
            case = f"{mode}, batch {batch} at {sizes.context}"
            if not report.is_late(f"decode {name}", case):
                _time_decode(report, name, case, executor, model, batch, sizes.context)
        if not captures and not report.is_late(f"prefill {name}", f"{sizes.chunk}"):
            _time_prefill(report, name, executor, model, sizes.chunk)
        del executor


def _time_decode(
    report: Report,
    name: str,
    case: str,
    executor: CudaExecutor,
    model: Decoder,
    batch: int,
    context: int,
) -> None:
    blocks_per_row = executor.layout.blocks_for(context + 1)
    plan = StepPlan(
        rows=tuple(
            Row(
                token_ids=(row % 250,),
                start=context - 1,
                block_table=range(row * blocks_per_row, (row + 1) * blocks_per_row),
                draw=_greedy(context),
            )
            for row in range(batch)
        )
    )
    seconds = report.clock.wall_s(lambda: executor.execute(plan))
    kv_bytes = batch * context * executor.layout.block_bytes / BLOCK_SIZE
    num_bytes = weight_bytes(model.config, model.dtype.itemsize) + kv_bytes
    report.add(
        f"decode {name}",
        case,
        f"{seconds * 1e3:.2f} ms, {batch / seconds:.0f} tok/s",
        report.share(seconds, num_bytes),
    )


def _time_prefill(
    report: Report, name: str, executor: CudaExecutor, model: Decoder, num_tokens: int
) -> None:
    num_blocks = executor.layout.blocks_for(num_tokens)
    token_ids: Sequence[int] = [index % 250 for index in range(num_tokens)]
    row = Row(token_ids=token_ids, start=0, block_table=range(num_blocks), draw=_greedy(num_tokens))
    plan = StepPlan(rows=(row,))
    seconds = report.clock.wall_s(lambda: executor.execute(plan))
    config = model.config
    # Head and embedding are not multiplied with every token.
    num_weights = weight_bytes(config, 1) - config.vocab_size * config.hidden_size
    seen = num_tokens * (num_tokens + 1) / 2
    attention = 4.0 * config.num_layers * config.num_query_heads * config.head_dim * seen
    report.add(
        f"prefill {name}",
        f"{num_tokens} tokens",
        f"{seconds * 1e3:.2f} ms, {num_tokens / seconds:.0f} tok/s",
        report.share(seconds, flops=2.0 * num_weights * num_tokens + attention),
    )


def _greedy(position: int) -> Draw:
    return Draw(sampling=SamplingParams(), seed=0, choice=0, position=position)
