"""The step loop over the emulated executor: real thread, real pool, tokens by the hash rule."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine.catalog import resolve_model
from engine.cost_model import CostProfile
from engine.emulated_executor import EmulatedExecutor, emulated_layout, next_token, pack_tokens
from engine.executor import Draw, StepPlan, StepResult
from engine.loop import Engine
from engine.reuse import reuse_of
from engine.run import Preempted, StepFailed
from engine.scheduler import Scheduler
from engine.sequence import GenerationSpec, SamplingParams, StopConditions
from kvtransfer.blocks import BlockPool
from kvtransfer.memory import HostMemory

FREE = CostProfile(
    base_ms=0.1,
    decode_row_ms=0,
    prefill_token_ms=0.01,
    decode_context_ms=0,
    prefill_context_ms=0,
)
LAYOUT = emulated_layout(model="emulated", block_size=4)


class Failing(EmulatedExecutor):
    """Fails every step that holds a prompt beginning with token 13."""

    def execute(self, plan: StepPlan) -> StepResult:
        if any(row.start == 0 and row.token_ids[0] == 13 for row in plan.rows):
            raise RuntimeError("unlucky")
        return super().execute(plan)


@asynccontextmanager
async def engine(num_blocks: int = 32):
    memory = HostMemory(LAYOUT, num_blocks)
    folder = resolve_model("emulated", allow_download=False).folder
    executor = Failing(folder=folder, memory=memory)
    freed = []
    pool = BlockPool(num_blocks, on_free=lambda: [tell() for tell in freed])
    scheduler = Scheduler(FREE, step_budget_ms=0.2, block_size=4)
    crashed = asyncio.Event()
    engine = Engine(
        executor=executor, scheduler=scheduler, pool=pool, memory=memory, on_crash=crashed.set
    )
    freed.append(engine.blocks_came_free)
    engine.crashed = crashed
    engine.start()
    try:
        yield engine, pool
    finally:
        await engine.stop()


def spec(prompt: list[int], *, max_tokens: int = 5) -> GenerationSpec:
    return GenerationSpec(
        request_id="r",
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        stop=StopConditions(max_tokens=max_tokens),
    )


def predicted(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        draw = Draw(sampling=SamplingParams(), seed=0, choice=0, position=len(tokens))
        tokens.append(next_token(pack_tokens(tokens), draw=draw, vocab_size=256))
    return tokens[len(prompt) :]


async def drain(run) -> list[int]:
    tokens: list[int] = []
    while True:
        for progress in await run.next():
            if progress.token_id is not None:
                tokens.append(progress.token_id)
            if progress.left:
                return tokens


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 50])
async def test_tokens_follow_the_rule_and_the_blocks_come_back(num_prompt: int):
    prompt = list(range(20, 20 + num_prompt))
    async with engine() as (loop, pool):
        lease = pool.reserve(15)
        async with loop.run() as run:
            run.start(spec(prompt), lease)
            assert await drain(run) == predicted(prompt, 5)
        pool.release(lease)
        while pool.counts().available != 32:
            await asyncio.sleep(0)


async def test_a_run_goes_on_from_kv_that_is_there():
    prompt = [1, 2, 3, 4, 5, 6]
    async with engine() as (loop, pool):
        lease = pool.reserve(4)
        async with loop.run() as run:
            run.start(spec(prompt), lease, max_new_tokens=1)
            (first,) = await drain(run)
        async with loop.run() as run:
            run.start(spec(prompt), lease, token_ids=(*prompt, first), num_computed=len(prompt))
            assert [first, *await drain(run)] == predicted(prompt, 5)


async def test_leaving_a_run_frees_its_blocks_while_others_go_on():
    async with engine() as (loop, pool):
        short, long = pool.reserve(4), pool.reserve(20)
        async with loop.run() as going_on:
            going_on.start(spec([7], max_tokens=60), long)
            async with loop.run() as run:
                run.start(spec([1, 2], max_tokens=14), short)
                await run.next()
            pool.release(short)
            while pool.counts().available != 12:
                await asyncio.sleep(0)
            assert await drain(going_on) == predicted([7], 60)


async def test_a_failed_step_ends_its_runs_and_the_engine_goes_on():
    async with engine() as (loop, pool):
        lease = pool.reserve(4)
        async with loop.run() as run:
            run.start(spec([13]), lease)
            with pytest.raises(StepFailed, match="unlucky"):
                await run.next()
        async with loop.run() as run:
            run.start(spec([1]), lease)
            assert await drain(run) == predicted([1], 5)
        pool.release(lease)
        while pool.counts().available != 32:
            await asyncio.sleep(0)


async def test_a_fault_of_ours_in_the_engine_thread_fails_its_runs_and_is_told(monkeypatch):
    def broken(self, step, result):
        raise AssertionError("invariant")

    async with engine() as (loop, pool), asyncio.timeout(5):
        monkeypatch.setattr(Scheduler, "apply", broken)
        lease = pool.reserve(4)
        async with loop.run() as run:
            run.start(spec([1]), lease)
            with pytest.raises(StepFailed, match="crashed"):
                await run.next()
        await loop.crashed.wait()


async def test_a_sequence_grows_past_its_lease_and_gives_everything_back():
    async with engine() as (loop, pool):
        lease = pool.reserve(1)
        async with loop.run() as run:
            run.start(spec([1, 2], max_tokens=40), lease)
            assert await drain(run) == predicted([1, 2], 40)
        pool.release(lease)
        while pool.counts().available != 32:
            await asyncio.sleep(0)


async def test_the_youngest_is_preempted_and_goes_on_from_what_it_has():
    """10 blocks of 4 tokens: two sequences of 30 tokens do not fit, one after the other does."""
    async with engine(10) as (loop, pool):
        old, young = pool.reserve(1), pool.reserve(1)
        async with loop.run() as first, loop.run() as second:
            first.start(replace(spec([1], max_tokens=29), age_s=10.0), old)
            second.start(spec([2], max_tokens=29), young)
            tokens: list[int] = []
            with pytest.raises(Preempted):
                while True:
                    tokens += [progress.token_id for progress in await second.next()]
            # Its owner has not let go of anything yet, and need not.
            assert await drain(first) == predicted([1], 29)
        pool.release(old)
        pool.release(young)
        assert tokens == predicted([2], 29)[: len(tokens)]
        assert 8 < len(tokens) < 29
        lease = pool.reserve(10)
        rest = replace(spec([2], max_tokens=29), token_ids=(2, *tokens))
        async with loop.run() as run:
            run.start(rest, lease)
            assert tokens + await drain(run) == predicted([2], 29)


async def test_the_lowest_priority_is_preempted_whatever_its_age():
    async with engine(10) as (loop, pool):
        old, young = pool.reserve(1), pool.reserve(1)
        async with loop.run() as first, loop.run() as second:
            first.start(replace(spec([1], max_tokens=29), age_s=10.0), old)
            second.start(replace(spec([2], max_tokens=29), priority=1), young)
            with pytest.raises(Preempted):
                while True:
                    await first.next()
            assert await drain(second) == predicted([2], 29)


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 6, 9])
async def test_a_second_choice_shares_full_blocks_and_has_a_copy_of_the_last(num_prompt):
    prompt = list(range(20, 20 + num_prompt))
    num_shared = (num_prompt - 1) // 4
    async with engine() as (loop, pool):
        lease = pool.reserve(10)
        async with loop.run() as run:
            one = run.start(spec(prompt), lease, block_ids=lease.block_ids[:5])
            first = await run.next()
            copied = lease.block_ids[num_shared] if (num_prompt - 1) % 4 else None
            two = run.start(
                spec(prompt),
                lease,
                block_ids=[*lease.block_ids[:num_shared], *lease.block_ids[5:]],
                num_computed=num_prompt - 1,
                copy_from=copied,
            )
            drawn = {one: [progress.token_id for progress in first], two: []}
            while any(len(tokens) < 5 for tokens in drawn.values()):
                for progress in await run.next():
                    drawn[progress.key].append(progress.token_id)
        assert drawn[one] == drawn[two] == predicted(prompt, 5)
        pool.release(lease)
        while pool.counts().available != 32:
            await asyncio.sleep(0)


async def compute_with_cache(loop, pool, prompt: list[int], *, max_tokens: int = 9):
    """A request as a node serves it; how many tokens of its prompt were there, and what it drew."""
    reuse = reuse_of(spec(prompt), LAYOUT, is_on=True)
    lease = pool.reserve((len(prompt) + max_tokens) // 4 + 1, prefix=reuse.prefix)
    num_cached = lease.num_cached * 4
    async with loop.run() as run:
        run.start(
            spec(prompt, max_tokens=max_tokens), lease, num_computed=num_cached, chain=reuse.chain
        )
        tokens = await drain(run)
    pool.release(lease)
    return num_cached, tokens


# The last token of a prompt is always computed, and of an answer never: blocks of 4.
@pytest.mark.parametrize(
    ("num_prompt", "num_again", "num_next"),
    [(1, 0, 8), (4, 0, 12), (5, 4, 12), (8, 4, 16), (9, 8, 16), (50, 48, 56)],
)
async def test_the_next_turn_finds_prompt_and_answer(num_prompt, num_again, num_next):
    prompt = list(range(20, 20 + num_prompt))
    async with engine() as (loop, pool):
        num_cached, answer = await compute_with_cache(loop, pool, prompt)
        assert (num_cached, answer) == (0, predicted(prompt, 9))
        assert await compute_with_cache(loop, pool, prompt) == (num_again, answer)
        turn = [*prompt, *answer, 77]
        assert await compute_with_cache(loop, pool, turn) == (num_next, predicted(turn, 9))
        while pool.counts().available != 32:
            await asyncio.sleep(0)


async def test_a_sequence_that_grows_publishes_what_it_fills_and_takes_cached_blocks():
    async with engine(num_blocks=10) as (loop, pool):
        # 6 blocks of another prompt stay behind, and must make place.
        await compute_with_cache(loop, pool, list(range(24)), max_tokens=1)
        assert pool.counts().cached == 6
        reuse = reuse_of(spec([7, 8]), LAYOUT, is_on=True)
        lease = pool.reserve(1)
        async with loop.run() as run:
            run.start(spec([7, 8], max_tokens=36), lease, chain=reuse.chain)
            answer = await drain(run)
        pool.release(lease)
        assert answer == predicted([7, 8], 36)
        while pool.counts().available != 10:
            await asyncio.sleep(0)
        assert await compute_with_cache(loop, pool, [7, 8, *answer[:30]], max_tokens=2) == (
            28,
            answer[30:32],
        )


async def test_two_that_begin_alike_at_once_draw_what_each_would_alone():
    async with engine(num_blocks=64) as (loop, pool):
        prompts = [[*range(30), last] for last in range(3)]
        got = await asyncio.gather(*(compute_with_cache(loop, pool, each) for each in prompts))
        assert [tokens for _, tokens in got] == [predicted(each, 9) for each in prompts]


async def test_a_prompt_that_is_scored_looks_nothing_up_and_is_kept():
    scored = replace(spec([1, 2, 3, 4, 5]), num_prompt_logprobs=0)
    reuse = reuse_of(scored, LAYOUT, is_on=True)
    assert reuse.prefix == ()
    assert reuse.chain is not None
    assert len(reuse.chain.hashes) == 1
    assert reuse_of(scored, LAYOUT, is_on=False).chain is None
