"""The C++ step against the torch one, and a row's bits against themselves however work is cut."""

import logging
import random
from pathlib import Path

import pytest
import torch

from engine.batch import pack
from engine.executor import Draw, Row, StepPlan
from engine.host_executor import host_executor
from engine.model_config import kv_layout, read_model_config
from engine.native_executor import NativeExecutor
from engine.sampler import draw_tokens
from engine.sequence import SamplingParams
from engine.torch_executor import TorchExecutor
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory
from tests.engine.test_model import VARIANTS, greedy, make_executor, shuffled_tables, tokens
from tests.kernels.cpu_ops import every_isa, make_runner
from tests.models import make_tiny_model

NUM_BLOCKS = 256

# Part of the standard deviation of the logits; the torch path in bfloat16 needs as much.
TOLERANCE = 0.25


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def layout_of(folder: Path, *, block_size: int, dtype: str = "bfloat16") -> KvLayout:
    config = read_model_config(folder)
    return kv_layout(config, model_name="m", digest="d", dtype=dtype, block_size=block_size)


def make_native(
    folder: Path, *, block_size: int = 16, isa: str | None = None, num_threads: int = 1
) -> NativeExecutor:
    """Over memory full of NaN, so that reading any slot that was not written shows."""
    runner = make_runner(isa, num_threads=num_threads)
    memory = HostMemory(layout_of(folder, block_size=block_size), NUM_BLOCKS)
    torch.frombuffer(memory.buffer, dtype=torch.bfloat16).fill_(float("nan"))
    return NativeExecutor(folder=folder, memory=memory, runner=runner)


def prompt_row(prompt: list[int], table: list[int], *, start: int = 0, end: int = 0) -> Row:
    """Tokens start to end of a prompt; the last of all draws."""
    end = end or len(prompt)
    draw = greedy(end) if end == len(prompt) else None
    return Row(token_ids=prompt[start:end], start=start, block_table=table, draw=draw)


@pytest.fixture(params=VARIANTS, scope="module")
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = VARIANTS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture, **overrides)


@every_isa
def test_logits_are_those_of_float32_but_for_rounding(variant: Path, isa: str) -> None:
    native = make_native(variant, block_size=5, isa=isa)
    reference = make_executor(variant, block_size=5, num_blocks=NUM_BLOCKS)
    prompts = [tokens(length, seed=length) for length in (1, 4, 5, 6, 123)]
    tables = shuffled_tables(native.layout, [len(p) for p in prompts], num_blocks=NUM_BLOCKS)
    plan = StepPlan(rows=tuple(map(prompt_row, prompts, tables)))
    native.execute(plan)
    pool, model = reference._pool, reference._model
    with torch.inference_mode():
        expected = model.forward(pack(plan, pool=pool), pool=pool)
    error = (native.logits(len(prompts)).float() - expected).abs().max()
    assert error < TOLERANCE * expected.std()


@every_isa
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_has_the_same_logits_alone_in_a_batch_and_in_any_chunk(
    llama: Path, isa: str, num_threads: int
) -> None:
    prompts = [tokens(length, seed=length) for length in (1, 16, 17, 40, 61)]
    whole = []
    for prompt in prompts:
        native = make_native(llama, isa=isa)
        native.execute(StepPlan(rows=(prompt_row(prompt, list(range(10, 20))),)))
        whole.append(native.logits(1)[0].clone())
    native = make_native(llama, block_size=3, isa=isa, num_threads=num_threads)
    tables = shuffled_tables(native.layout, [61] * len(prompts), num_blocks=NUM_BLOCKS)
    cuts = random.Random(4)
    done = [0] * len(prompts)
    while any(n < len(prompt) for n, prompt in zip(done, prompts, strict=True)):
        active = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]
        ends = [min(len(prompts[i]), done[i] + cuts.choice((1, 1, 2, 7, 30))) for i in active]
        rows = tuple(
            prompt_row(prompts[i], tables[i], start=done[i], end=end)
            for i, end in zip(active, ends, strict=True)
        )
        native.execute(StepPlan(rows=rows))
        logits_BV = iter(native.logits(sum(row.draw is not None for row in rows)))
        for i, row, end in zip(active, rows, ends, strict=True):
            done[i] = end
            if row.draw is not None:
                assert torch.equal(next(logits_BV), whole[i])


def test_greedy_and_sampled_rows_draw_what_the_sampler_draws(llama: Path) -> None:
    native = make_native(llama)
    tables = shuffled_tables(native.layout, [9] * 4, num_blocks=NUM_BLOCKS)
    sampled = SamplingParams(temperature=0.8, top_k=50)
    draws = [
        Draw(sampling=SamplingParams(), seed=0, choice=0, position=9),
        Draw(sampling=sampled, seed=5, choice=0, position=9),
        None,
        Draw(sampling=SamplingParams(), seed=0, choice=0, position=9),
    ]
    rows = [
        Row(token_ids=tokens(9, seed=seed), start=0, block_table=table, draw=draw)
        for seed, (table, draw) in enumerate(zip(tables, draws, strict=True))
    ]
    drawn = native.execute(StepPlan(rows=tuple(rows))).token_ids
    logits_BV = native.logits(3).clone()
    expected = draw_tokens(logits_BV, [draw for draw in draws if draw is not None])
    assert drawn == (expected[0], expected[1], None, expected[2])
    best = drawn[0]
    assert best is not None
    banned = Draw(
        sampling=SamplingParams(), seed=0, choice=0, position=9, banned_token_ids=frozenset({best})
    )
    row = Row(token_ids=tokens(9, seed=0), start=0, block_table=tables[0], draw=banned)
    assert (
        native.execute(StepPlan(rows=(row,))).token_ids[0]
        == draw_tokens(logits_BV[:1], [banned])[0]
        != best
    )


def test_a_step_that_draws_nothing_writes_its_kv(llama: Path) -> None:
    native = make_native(llama)
    prompt = tokens(40, seed=1)
    for start, end in ((0, 33), (33, 39)):
        row = prompt_row(prompt, [7, 3, 5], start=start, end=end)
        assert native.execute(StepPlan(rows=(row,))).token_ids == (None,)
    native.execute(StepPlan(rows=(prompt_row(prompt, [7, 3, 5], start=39),)))
    chunked = native.logits(1).clone()
    native.execute(StepPlan(rows=(prompt_row(prompt, [1, 2, 4]),)))
    assert torch.equal(chunked, native.logits(1))


def test_what_does_not_exist_is_refused_before_anything_is_written(llama: Path) -> None:
    native = make_native(llama, block_size=4)
    draw = greedy(2)
    short = Row(token_ids=[1, 2], start=3, block_table=(0,), draw=None)
    with pytest.raises(ValueError, match="row 0: 2 tokens at 3 do not fit 1 blocks of 4"):
        native.execute(StepPlan(rows=(short,)))
    for token_id in (-1, native.vocab_size):
        row = Row(token_ids=[1, token_id], start=0, block_table=(0,), draw=draw)
        with pytest.raises(ValueError, match="token id"):
            native.execute(StepPlan(rows=(row,)))
    for block in (-1, NUM_BLOCKS):
        row = Row(token_ids=[1, 2], start=0, block_table=(block,), draw=draw)
        with pytest.raises(ValueError, match="block"):
            native.execute(StepPlan(rows=(row,)))
    assert native._pool.isnan().all()
    assert native.execute(StepPlan(rows=())).token_ids == ()


def test_logits_without_a_maximum_are_an_error(llama: Path) -> None:
    native = make_native(llama)
    # Its context was never written, so that it attends to NaN.
    row = Row(token_ids=[1], start=20, block_table=(0, 1), draw=greedy(21))
    with pytest.raises(ValueError, match="no finite maximum"):
        native.execute(StepPlan(rows=(row,)))


def test_a_row_of_nan_leaves_nothing_behind(llama: Path) -> None:
    native = make_native(llama)
    good = prompt_row(tokens(20, seed=1), [5, 6])
    native.execute(StepPlan(rows=(good,)))
    expected = native.logits(1).clone()
    bad = tuple(
        Row(token_ids=[1] * 20, start=20, block_table=(0, 1, 2), draw=None) for _ in range(3)
    )
    native.execute(StepPlan(rows=bad))
    native.execute(StepPlan(rows=(good,)))
    assert torch.equal(native.logits(1), expected)


def test_memory_of_another_layout_is_refused(llama: Path) -> None:
    memory = HostMemory(layout_of(llama, block_size=4, dtype="float32"), 2)
    with pytest.raises(ValueError, match="dtype 'float32' is not 'bfloat16'"):
        NativeExecutor(folder=llama, memory=memory, runner=make_runner())


def test_bfloat16_gets_the_kernels_and_float32_torch(llama: Path) -> None:
    make_runner()
    for dtype, kind in (("bfloat16", NativeExecutor), ("float32", TorchExecutor)):
        memory = HostMemory(layout_of(llama, block_size=4, dtype=dtype), 2)
        assert type(host_executor(llama, dtype=dtype, memory=memory)) is kind


def test_without_a_compiler_there_is_torch_and_one_warning(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    memory = HostMemory(layout_of(llama, block_size=4), 2)
    with caplog.at_level(logging.WARNING):
        executor = host_executor(llama, dtype="bfloat16", memory=memory)
    assert type(executor) is TorchExecutor
    (record,) = caplog.records
    assert "no C++ compiler" in record.getMessage()


@every_isa
def test_a_prompt_of_several_passes_has_the_logits_of_its_chunks(llama: Path, isa: str) -> None:
    prompt = tokens(489, seed=2)
    native = make_native(llama, isa=isa, num_threads=2)
    native.execute(StepPlan(rows=(prompt_row(prompt, list(range(40))),)))
    whole = native.logits(1).clone()
    table = list(range(100, 140))
    for start, end in ((0, 257), (257, 488), (488, 489)):
        row = prompt_row(prompt, table, start=start, end=end)
        native.execute(StepPlan(rows=(row,)))
    assert torch.equal(native.logits(1), whole)
