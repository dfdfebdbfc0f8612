"""A thousand requests of every kind while nodes die again and again: exact or a typed error.

One node is killed and started again each time the cluster has been whole for a while.
"""

import asyncio
import contextlib
import random

import psutil
import pytest

from coordinator.client import AsyncClient
from coordinator.events import Delta, GenerationError
from tests.e2e.fault_cluster import COORDINATOR, FaultCluster
from tests.e2e.serving import predicted

NUM_REQUESTS, AT_ONCE = 1000, 16
WHOLE_S = 2.0
MAX_GROWTH_BYTES = 30e6


async def one(client: AsyncClient, rng: random.Random) -> str:
    """One request; returns how it ended. Fails unless what came is right."""
    prompt = [rng.randrange(256) for _ in range(rng.choice((1, 16, 17, 200, 2000)))]
    num_tokens, n = rng.choice((1, 2, 30, 150)), rng.choice((1, 1, 1, 2, 3))
    seed = rng.randrange(2**40)
    stops = [rng.randrange(256)] if rng.random() < 0.2 else []
    got: dict[int, list[int]] = {}

    async def read() -> None:
        async for event in client.generate(
            prompt,
            max_tokens=num_tokens,
            n=n,
            temperature=1.0,
            seed=seed,
            stop_token_ids=stops,
            priority=rng.randrange(-1, 2),
            tenant=rng.choice("abc"),
            timeout_s=rng.choice((0.3, 60, 60, 60)),
        ):
            if isinstance(event, Delta):
                got.setdefault(event.choice, []).extend(event.token_ids)

    outcome = "ok"
    try:
        async with asyncio.timeout(rng.uniform(0, 1) if rng.random() < 0.3 else None):
            await read()
    except TimeoutError:
        outcome = "cancelled"
    except GenerationError as error:
        outcome = error.reason or error.status.name
    for choice in range(n):
        expected = predicted(prompt, num_tokens, seed=seed, choice=choice)
        ends = [expected.index(stop) + 1 for stop in stops if stop in expected]
        expected = expected[: min(ends, default=num_tokens)]
        tokens = got.get(choice, [])
        assert tokens == (expected if outcome == "ok" else expected[: len(tokens)])
    return outcome


async def kill_again_and_again(cluster: FaultCluster, rng: random.Random) -> None:
    while True:
        await cluster.registered()
        await asyncio.sleep(WHOLE_S)
        victim = rng.choice(cluster.nodes)
        cluster.children[victim].kill()
        await cluster.children[victim].exited
        await cluster.start(victim)


@pytest.mark.faults
@pytest.mark.timeout(400)
async def test_a_thousand_requests_of_every_kind_while_nodes_die():
    rng = random.Random(11)
    flags = ["--kv-memory-gb", "0.0004", "--drain-grace-s", "0.5"]
    async with (
        FaultCluster(model="emulated", flags=flags) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        coordinator = psutil.Process(cluster.children[COORDINATOR].pid)
        limit = asyncio.Semaphore(AT_ONCE)

        async def limited() -> str:
            async with limit:
                return await one(client, rng)

        await asyncio.gather(*(limited() for _ in range(100)))
        before = coordinator.memory_info().rss
        killing = asyncio.create_task(kill_again_and_again(cluster, rng))
        outcomes = await asyncio.gather(*(limited() for _ in range(NUM_REQUESTS)))
        killing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killing
        for name in cluster.nodes:
            if cluster.children[name].exited.done():
                await cluster.start(name)
        await cluster.registered()
        async with asyncio.timeout(2):
            await cluster.whole()
        growth = coordinator.memory_info().rss - before
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    print(f"{counts}, coordinator grew by {growth / 1e6:.1f} MB")
    assert set(outcomes) <= {
        *("ok", "cancelled", "DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE"),
        *("NODE_LOST", "LANE_LOST", "TRANSFER_ABORTED"),
    }
    assert outcomes.count("ok") > NUM_REQUESTS // 3
    assert growth < MAX_GROWTH_BYTES
