"""The prefix cache changes no token: a tiny model in float32, real processes, pools smaller than
what is asked for; conversations that were answered without a cache are replayed with one.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coordinator.client import AsyncClient
from coordinator.events import Delta, PromptLogprobs
from coordinator.supervisor import Cluster
from tests.e2e.conversations import BLOCK_SIZE, Turn, near_ties, play, replay, system_prompts
from tests.e2e.serving import collect, wait_all_available
from tests.models import make_tiny_model, reference_model

# 60 blocks of 7,680 bytes: less than four of the longest requests at a time.
NODE_OPTIONS = {"dtype": "float32", "block_size": BLOCK_SIZE, "kv_memory_gb": 0.00047}
AT_ONCE = 3

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "m", "llama")


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return reference_model(model)


def cluster(
    model: Path, *, num_prefill: int, num_decode: int = 1, prefix_cache: str = "on"
) -> Cluster:
    return Cluster(
        model=str(model),
        num_prefill=num_prefill,
        num_decode=num_decode,
        node_options=NODE_OPTIONS | {"prefix_cache": prefix_cache},
        coordinator_options={"local_prefill": "never"},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(model: Path) -> AsyncIterator[dict[str, AsyncClient]]:
    clusters = {
        "off": cluster(model, num_prefill=0, prefix_cache="off"),
        "disaggregated": cluster(model, num_prefill=1),
        "local": cluster(model, num_prefill=0),
    }
    async with AsyncExitStack() as stack:
        await asyncio.gather(*map(stack.enter_async_context, clusters.values()))
        yield {
            name: await stack.enter_async_context(AsyncClient(each.address))
            for name, each in clusters.items()
        }


async def conversations(
    client: AsyncClient, *, seed: int, count: int, num_turns: int
) -> list[list[Turn]]:
    rng = random.Random(seed)
    systems = system_prompts(rng)
    seeds = [rng.random() for _ in range(count)]
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(its_seed: float) -> list[Turn]:
        async with limit:
            return await play(client, random.Random(its_seed), systems, num_turns=num_turns)

    return await asyncio.gather(*map(one, seeds))


async def test_conversations_get_the_same_tokens_with_and_without_the_cache(clients, reference):
    played = await conversations(clients["off"], seed=1, count=12, num_turns=5)
    num_prompt_tokens = sum(len(turn.prompt) for turns in played for turn in turns)
    for served_as in ("disaggregated", "local"):
        results = await replay(clients[served_as], played, at_once=AT_ONCE)
        num_ties = near_ties(reference, played, results)
        finished = [result.finished for each in results for result in each]
        num_cached = sum(each.cached_tokens for each in finished)
        assert {each.served_as for each in finished} == {served_as}
        assert num_cached > num_prompt_tokens / 4
        print(f"{served_as}: {num_cached} of {num_prompt_tokens} cached, {num_ties} near ties")
        await wait_all_available(clients[served_as])


# A prompt that was just served: all of its full blocks, but never the one of its last token.
@pytest.mark.parametrize(
    ("num_prompt", "expected"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (123, 112)]
)
async def test_usage_tells_what_was_not_computed(clients, num_prompt, expected):
    prompt = [(num_prompt + 7 * index) % 256 for index in range(num_prompt)]
    for served_as in ("disaggregated", "local"):
        cold = await collect(clients[served_as], prompt, max_tokens=3, ignore_eos=True)
        warm = await collect(clients[served_as], prompt, max_tokens=3, ignore_eos=True)
        assert (cold.finished.cached_tokens, warm.finished.cached_tokens) == (0, expected)
        assert cold.token_ids == warm.token_ids
    off = await collect(clients["off"], prompt, max_tokens=3, ignore_eos=True)
    again = await collect(clients["off"], prompt, max_tokens=3, ignore_eos=True)
    assert off.token_ids == again.token_ids == warm.token_ids
    assert again.finished.cached_tokens == 0


async def test_the_next_turn_finds_the_answer_where_it_was_generated(clients):
    prompt = [(11 * index + 3) % 256 for index in range(40)]
    first = await collect(clients["local"], prompt, max_tokens=30, ignore_eos=True)
    turn = [*prompt, *first.token_ids, 65, 66]
    # KV of 69 of the 70 tokens is there: 4 full blocks.
    second = await collect(clients["local"], turn, max_tokens=5, ignore_eos=True)
    assert second.finished.cached_tokens == 64
    off = await collect(clients["off"], turn, max_tokens=5, ignore_eos=True)
    assert second.token_ids == off.token_ids


async def choices_of(client: AsyncClient, prompt: Sequence[int]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    options = {"max_tokens": 9, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    async for event in client.generate(prompt, n=3, **options):
        if isinstance(event, Delta):
            tokens.setdefault(event.choice, []).extend(event.token_ids)
    return tokens


@pytest.mark.parametrize("num_prompt", [16, 17, 40, 48])
async def test_parallel_choices_begin_with_what_is_cached(clients, num_prompt):
    prompt = [(5 * index + num_prompt) % 256 for index in range(num_prompt)]
    expected = await choices_of(clients["off"], prompt)
    assert sorted(expected) == [0, 1, 2]
    for served_as in ("disaggregated", "local"):
        assert await choices_of(clients[served_as], prompt) == expected
        assert await choices_of(clients[served_as], prompt) == expected


async def test_prompt_logprobs_are_whole_though_the_prompt_is_cached(clients):
    prompt = [(3 * index + 1) % 256 for index in range(50)]
    for served_as in ("disaggregated", "local"):
        await collect(clients[served_as], prompt, max_tokens=2)
        positions: list[int] = []
        async for event in clients[served_as].generate(prompt, max_tokens=2, prompt_logprobs=0):
            if isinstance(event, PromptLogprobs):
                positions += range(event.position, event.position + len(event.tokens))
        assert positions == list(range(1, 50))


async def test_tenants_do_not_find_each_others_prefixes(clients):
    prompt = [(13 * index + 2) % 256 for index in range(50)]
    for served_as in ("disaggregated", "local"):
        client = clients[served_as]
        hits = [
            (await collect(client, prompt, max_tokens=2, tenant=tenant)).finished.cached_tokens
            for tenant in ("a", "a", "b", "b")
        ]
        assert hits == [0, 48, 0, 48]


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_300_conversations_while_nodes_are_killed(model, reference, clients):
    played = await conversations(clients["off"], seed=2, count=300, num_turns=4)
    async with (
        cluster(model, num_prefill=2, num_decode=2) as killed,
        AsyncClient(killed.address) as client,
    ):
        replaying = asyncio.create_task(replay(client, played, at_once=AT_ONCE))
        rng = random.Random(3)
        num_kills = 0
        while not replaying.done():
            name = rng.choice(("prefill-0", "decode-0"))
            killed.processes[name].kill()
            await killed.processes[name].exited
            await killed.start_node(name)
            await killed.wait_serving()
            num_kills += 1
            await asyncio.wait([replaying], timeout=rng.uniform(1, 5))
        results = await replaying
        num_ties = near_ties(reference, played, results)
        finished = [result.finished for each in results for result in each]
        assert sum(each.cached_tokens for each in finished) > 0
        num_resumed = sum(each.served_as == "resumed" for each in finished)
        print(f"{num_kills} kills, {num_resumed} requests resumed, {num_ties} near ties")
        await wait_all_available(client)
