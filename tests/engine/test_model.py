"""The decoder against transformers: same logits, same tokens, however the work is cut up."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import pack
from engine.executor import Draw, Row, StepPlan
from engine.model import load_model
from engine.model_config import kv_layout
from engine.sequence import SamplingParams
from engine.torch_executor import TorchExecutor
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory
from tests.models import VOCAB_SIZE, make_tiny_model, reference_greedy, reference_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama head_dim derived": ("llama", {"head_dim": None}),
    "llama one query head per kv head": ("llama", {"num_key_value_heads": 6}),
    "qwen2": ("qwen2", {"head_dim": 8}),
    "qwen2 tied": ("qwen2", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3 tied, all heads on one": (
        "qwen3",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "mistral": ("mistral", {}),
    "mistral with a window below a block": ("mistral", {"sliding_window": 3}),
    "mistral with a window across blocks": ("mistral", {"sliding_window": 37}),
    "qwen2 with windows from layer 1 on": (
        "qwen2",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 1,
        },
    ),
    "qwen3 with windows by layer type": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "qwen3 yarn rope, its own attention factor": (
        "qwen3",
        {"rope_parameters": YARN | {"attention_factor": 1.5, "beta_fast": 8.0, "truncate": False}},
    ),
}


@pytest.fixture(params=VARIANTS, scope="module")
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = VARIANTS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture, **overrides)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def make_executor(
    folder: Path, *, block_size: int, num_blocks: int = 64, dtype: str = "float32"
) -> TorchExecutor:
    """Over memory full of NaN, so that reading any slot that was not written shows."""
    model = load_model(folder, dtype=dtype)
    layout = kv_layout(model.config, model_name="m", digest="d", dtype=dtype, block_size=block_size)
    memory = HostMemory(layout, num_blocks)
    torch.frombuffer(memory.buffer, dtype=model.dtype).fill_(float("nan"))
    return TorchExecutor(model=model, memory=memory)


def tokens(num_tokens: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


def shuffled_tables(
    layout: KvLayout, lengths: Sequence[int], *, num_blocks: int
) -> list[list[int]]:
    """Disjoint block tables, out of order, for sequences of at most these lengths."""
    blocks = list(range(num_blocks))
    random.Random(1).shuffle(blocks)
    return [[blocks.pop() for _ in range(layout.blocks_for(length))] for length in lengths]


def greedy(position: int) -> Draw:
    return Draw(sampling=SamplingParams(), seed=0, choice=0, position=position)


class Run:
    """One greedy generation, cut into rows: chunks of the prompt, then a token at a time."""

    def __init__(
        self, prompt: list[int], table: list[int], chunks: Iterator[int], want: int
    ) -> None:
        self.token_ids = list(prompt)
        self.num_prompt = len(prompt)
        self.want = len(prompt) + want
        self._table, self._chunks, self._num_done = table, chunks, 0

    @property
    def finished(self) -> bool:
        return len(self.token_ids) >= self.want

    def next_row(self) -> Row:
        left = len(self.token_ids) - self._num_done
        size = left if self._num_done >= self.num_prompt else min(next(self._chunks), left)
        start, self._num_done = self._num_done, self._num_done + size
        ends = self._num_done == len(self.token_ids)
        return Row(
            token_ids=self.token_ids[start : self._num_done],
            start=start,
            block_table=self._table,
            draw=greedy(self._num_done) if ends else None,
        )


def generate_together(executor: TorchExecutor, runs: Sequence[Run]) -> list[list[int]]:
    while active := [run for run in runs if not run.finished]:
        result = executor.execute(StepPlan(rows=tuple(run.next_row() for run in active)))
        for run, token_id in zip(active, result.token_ids, strict=True):
            if token_id is not None:
                run.token_ids.append(token_id)
    return [run.token_ids[run.num_prompt :] for run in runs]


def test_logits_of_a_whole_prompt_are_those_of_transformers(variant: Path) -> None:
    executor = make_executor(variant, block_size=16)
    prompt = tokens(123, seed=3)
    (table,) = shuffled_tables(executor.layout, [123], num_blocks=64)
    rows = (Row(token_ids=prompt, start=0, block_table=table, draw=greedy(123)),)
    pool, model = executor._pool, executor._model
    with torch.inference_mode():
        ours = model.forward(pack(StepPlan(rows=rows), pool=pool), pool=pool)
        theirs = reference_model(variant)(torch.tensor([prompt])).logits[0, -1:]
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_tokens_are_those_of_transformers_when_chunks_and_decode_rows_mix(variant: Path) -> None:
    executor = make_executor(variant, block_size=5)
    lengths, want = (1, 4, 5, 6, 61), 9
    prompts = [tokens(length, seed=length) for length in lengths]
    tables = shuffled_tables(executor.layout, [n + want for n in lengths], num_blocks=64)
    runs = [
        Run(prompt, table, itertools.cycle((7, 1, 3)), want)
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    reference = reference_model(variant)
    expected = [reference_greedy(reference, prompt, num_tokens=want) for prompt in prompts]
    assert generate_together(executor, runs) == expected


@pytest.mark.parametrize("block_size", [1, 3, 16, 123])
@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 200])
def test_tokens_depend_neither_on_chunk_nor_on_block_size(
    llama: Path, block_size: int, chunk: int
) -> None:
    executor = make_executor(llama, block_size=block_size, num_blocks=256)
    prompt = tokens(53, seed=5)
    (table,) = shuffled_tables(executor.layout, [53 + 12], num_blocks=256)
    run = Run(prompt, table, itertools.repeat(chunk), 12)
    expected = reference_greedy(reference_model(llama), prompt, num_tokens=12)
    assert generate_together(executor, [run]) == [expected]


def test_a_chunk_that_draws_nothing_answers_none_and_still_writes_its_kv(llama: Path) -> None:
    executor = make_executor(llama, block_size=4)
    prompt = tokens(11, seed=6)
    (table,) = shuffled_tables(executor.layout, [12], num_blocks=64)
    first = Row(token_ids=prompt[:6], start=0, block_table=table, draw=None)
    second = Row(token_ids=prompt[6:], start=6, block_table=table, draw=greedy(11))
    assert executor.execute(StepPlan(rows=(first,))).token_ids == (None,)
    drawn = executor.execute(StepPlan(rows=(second,))).token_ids
    assert list(drawn) == reference_greedy(reference_model(llama), prompt, num_tokens=1)


def test_a_block_table_longer_than_the_context_is_cut(llama: Path) -> None:
    executor = make_executor(llama, block_size=4)
    prompt = tokens(9, seed=7)
    (table,) = shuffled_tables(executor.layout, [100], num_blocks=64)
    run = Run(prompt, table, itertools.repeat(100), 5)
    assert generate_together(executor, [run]) == [
        reference_greedy(reference_model(llama), prompt, num_tokens=5)
    ]


def test_bfloat16_stays_close_to_float32(llama: Path) -> None:
    prompt = tokens(40, seed=8)
    logits = {}
    for dtype in ("float32", "bfloat16"):
        executor = make_executor(llama, block_size=16, dtype=dtype)
        rows = (Row(token_ids=prompt, start=0, block_table=(9, 2, 5), draw=greedy(40)),)
        pool = executor._pool
        with torch.inference_mode():
            batch = pack(StepPlan(rows=rows), pool=pool)
            logits[dtype] = executor._model.forward(batch, pool=pool).float()
    spread = logits["float32"].std()
    # bfloat16 keeps 8 bits; a layer adds up a few such errors.
    assert (logits["bfloat16"] - logits["float32"]).abs().max() < 0.2 * spread


def test_an_empty_plan_gives_an_empty_result(llama: Path) -> None:
    executor = make_executor(llama, block_size=4)
    assert executor.execute(StepPlan(rows=())).token_ids == ()


def test_a_row_that_its_blocks_do_not_cover_is_refused(llama: Path) -> None:
    executor = make_executor(llama, block_size=4)
    row = Row(token_ids=[1, 2], start=3, block_table=(0,), draw=None)
    with pytest.raises(ValueError, match="row 0: 2 tokens at 3 do not fit 1 blocks of 4"):
        executor.execute(StepPlan(rows=(row,)))


def test_memory_of_another_layout_is_refused(llama: Path) -> None:
    model = load_model(llama, dtype="float32")
    layout = kv_layout(model.config, model_name="m", digest="d", dtype="bfloat16", block_size=4)
    with pytest.raises(ValueError, match="dtype 'bfloat16' is not 'float32'"):
        TorchExecutor(model=model, memory=HostMemory(layout, 2))


def test_an_unknown_dtype_is_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="dtype: 'float16' is not one of bfloat16, float32"):
        load_model(llama, dtype="float16")
