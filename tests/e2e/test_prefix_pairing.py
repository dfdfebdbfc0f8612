"""Caches through real processes: what is found again, by whom, where, and what is told of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from coordinator.client import AsyncClient
from coordinator.events import Finished, GenerationError, PromptLogprobs
from coordinator.supervisor import Cluster
from tests.e2e.serving import Result, collect, predicted

pytestmark = pytest.mark.asyncio(loop_scope="module")

# 20 full blocks of 16 tokens, and 5 tokens more.
NUM_CACHED = 320


def prompt(first: int) -> list[int]:
    """One that no other test begins with."""
    return [first, *(index % 250 for index in range(1, NUM_CACHED + 5))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    async with (
        Cluster(
            coordinator_options={"local_prefill": "never"},
            model="emulated",
            num_prefill=2,
            num_decode=2,
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        yield client


async def cached(client: AsyncClient, token_ids: list[int], **options: object) -> int:
    result = await collect(client, token_ids, max_tokens=4, **options)
    assert result.token_ids == predicted(token_ids, 4)
    return result.finished.cached_tokens


async def again(client: AsyncClient, token_ids: list[int], **options: object) -> Result:
    """The first answer that is served from the cache: the coordinator hears of it a little later
    than the client of its answer."""
    async with asyncio.timeout(20):
        while True:
            result = await collect(client, token_ids, **{"max_tokens": 4, **options})
            if result.finished.cached_tokens:
                return result


async def test_a_prompt_that_comes_again_is_computed_but_for_its_last_block(client):
    assert await cached(client, prompt(1)) == 0
    result = await again(client, prompt(1))
    assert result.token_ids == predicted(prompt(1), 4)
    assert result.finished.cached_tokens == NUM_CACHED
    # Another end: the blocks before it.
    forked = [*prompt(1)[:100], *prompt(2)]
    result = await again(client, forked)
    assert result.token_ids == predicted(forked, 4)
    assert result.finished.cached_tokens == 96
    # One token needs no decode node.
    result = await again(client, prompt(1), max_tokens=1)
    assert (result.finished.cached_tokens, result.finished.decode_node) == (NUM_CACHED, "")


async def test_explain_tells_of_predicted_and_real_hits_by_side(client):
    await cached(client, prompt(3))
    await again(client, prompt(3))
    await again(client, prompt(3), request_id="explained")
    events = {event.what: event.details for event in await client.explain("explained")}
    assert events["paired"]["prefill_cached"] == str(NUM_CACHED)
    sides = [e.details for e in await client.explain("explained") if e.what == "cached"]
    assert {"side": "prefill", "tokens": str(NUM_CACHED), "predicted": str(NUM_CACHED)} in sides
    assert {side["side"] for side in sides} == {"prefill", "decode"}


async def test_another_tenant_finds_nothing(client):
    assert await cached(client, prompt(4), tenant="a") == 0
    assert await cached(client, prompt(4), tenant="b") == 0
    assert await cached(client, prompt(4)) == 0
    assert (await again(client, prompt(4), tenant="a")).finished.cached_tokens == NUM_CACHED


async def test_prompt_logprobs_are_computed_whole(client):
    await again(client, prompt(5))
    num_scored, num_cached = 0, -1
    async for event in client.generate(prompt(5), max_tokens=4, prompt_logprobs=0):
        if isinstance(event, PromptLogprobs):
            num_scored += len(event.tokens)
        elif isinstance(event, Finished):
            num_cached = event.cached_tokens
    # All but the first one.
    assert (num_scored, num_cached) == (len(prompt(5)) - 1, 0)


async def test_a_cleared_cache_has_nothing(client):
    assert await cached(client, prompt(6)) == 0
    await again(client, prompt(6))
    for node in await client.list_nodes():
        await client.clear_cache(node.node_id)
    with pytest.raises(GenerationError, match="UNKNOWN_NODE"):
        await client.clear_cache("nobody")
    assert await cached(client, prompt(6)) == 0


async def test_a_shared_cache_is_found_by_all_tenants():
    options = {"share_prefix_cache": True}
    async with (
        Cluster(
            coordinator_options=options, model="emulated", num_prefill=1, num_decode=1
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        assert await cached(client, prompt(1), tenant="a") == 0
        result = await again(client, prompt(1), tenant="b")
        assert result.finished.cached_tokens == NUM_CACHED
        # All but five tokens are on the decode node: no prefill node is called.
        async with asyncio.timeout(20):
            while result.finished.served_as != "local":
                result = await again(client, prompt(1), tenant="b")
        assert result.finished.served_as_reason == "prefix cached"
        assert result.finished.prefill_node == ""
        assert result.finished.cached_tokens == NUM_CACHED
        assert result.token_ids == predicted(prompt(1), 4)
