"""The step loop over the emulated executor: real thread, real pool, tokens by the hash rule."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from engine.catalog import resolve_model
from engine.cost_model import CostProfile
from engine.emulated_executor import EmulatedExecutor, emulated_layout, next_token, pack_tokens
from engine.executor import Draw, StepPlan, StepResult
from engine.loop import Engine, StepFailed
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


class Failing(EmulatedExecutor):
    """Fails every step that holds a prompt beginning with token 13."""

    def execute(self, plan: StepPlan) -> StepResult:
        if any(row.start == 0 and row.token_ids[0] == 13 for row in plan.rows):
            raise RuntimeError("unlucky")
        return super().execute(plan)


@asynccontextmanager
async def engine(num_blocks: int = 32):
    memory = HostMemory(emulated_layout(model="emulated", block_size=4), num_blocks)
    folder = resolve_model("emulated", allow_download=False).folder
    executor = Failing(folder=folder, memory=memory)
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(FREE, step_budget_ms=0.2, block_size=4)
    crashed = asyncio.Event()
    engine = Engine(executor=executor, scheduler=scheduler, pool=pool, on_crash=crashed.set)
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
        async with loop.run(spec(prompt), lease) as run:
            assert await drain(run) == predicted(prompt, 5)
        pool.release(lease)
        while pool.counts().available != 32:
            await asyncio.sleep(0)


async def test_a_run_goes_on_from_kv_that_is_there():
    prompt = [1, 2, 3, 4, 5, 6]
    async with engine() as (loop, pool):
        lease = pool.reserve(4)
        async with loop.run(spec(prompt), lease, max_new_tokens=1) as run:
            (first,) = await drain(run)
        async with loop.run(
            spec(prompt), lease, token_ids=(*prompt, first), num_computed=len(prompt)
        ) as run:
            assert [first, *await drain(run)] == predicted(prompt, 5)


async def test_leaving_a_run_frees_its_blocks_while_others_go_on():
    async with engine() as (loop, pool):
        short, long = pool.reserve(4), pool.reserve(20)
        async with loop.run(spec([7], max_tokens=60), long) as going_on:
            async with loop.run(spec([1, 2], max_tokens=14), short) as run:
                await run.next()
            pool.release(short)
            while pool.counts().available != 12:
                await asyncio.sleep(0)
            assert await drain(going_on) == predicted([7], 60)


async def test_a_failed_step_ends_its_runs_and_the_engine_goes_on():
    async with engine() as (loop, pool):
        lease = pool.reserve(4)
        async with loop.run(spec([13]), lease) as run:
            with pytest.raises(StepFailed, match="unlucky"):
                await run.next()
        async with loop.run(spec([1]), lease) as run:
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
        async with loop.run(spec([1]), lease) as run:
            with pytest.raises(StepFailed, match="crashed"):
                await run.next()
        await loop.crashed.wait()
