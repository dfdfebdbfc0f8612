"""Emulated clusters: many real processes, and outputs that the hash rule predicts."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from coordinator.client import AsyncClient
from coordinator.supervisor import Cluster
from tests.e2e.serving import EMULATED_VOCAB_SIZE, collect, predicted, wait_all_available

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(
        coordinator_options={"local_prefill": "never"},
        model="emulated",
        num_prefill=4,
        num_decode=8,
        node_options={"kv_memory_gb": 0.00002},
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client


async def test_200_concurrent_requests_on_twelve_nodes_get_the_predicted_tokens(client):
    rng = random.Random(1)

    async def one() -> tuple[str, str]:
        prompt = [
            rng.randrange(EMULATED_VOCAB_SIZE) for _ in range(rng.choice((1, 15, 16, 17, 100, 700)))
        ]
        num_tokens, seed = rng.choice((1, 2, 20)), rng.choice((None, rng.randrange(2**60)))
        sample = {} if seed is None else {"temperature": 1.0, "seed": seed}
        result = await collect(client, prompt, max_tokens=num_tokens, **sample)
        assert result.token_ids == predicted(prompt, num_tokens, seed=seed)
        assert result.finished.served_as == "disaggregated"
        assert result.finished.choices[0].reason == "length"
        return result.finished.prefill_node, result.finished.decode_node

    pairs = await asyncio.gather(*(one() for _ in range(200)))
    assert len({prefill for prefill, _ in pairs}) == 4
    assert len({decode for _, decode in pairs if decode}) == 8
    await wait_all_available(client)


async def test_requests_wait_for_blocks_and_all_are_served(client):
    """Each takes most of a node's pool (5,000 tokens), so that most of them must wait."""
    prompt = [3] * 2_000
    results = await asyncio.gather(
        *(collect(client, prompt, max_tokens=1_500, stop_token_ids=[9]) for _ in range(20))
    )
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert {result.finished.choices[0].reason for result in results} == {"stop"}
    await wait_all_available(client)


async def test_a_third_of_200_requests_cancelled_at_random_moments_leaks_nothing(client):
    rng = random.Random(2)

    async def one(index: int) -> None:
        prompt = [rng.randrange(EMULATED_VOCAB_SIZE) for _ in range(rng.randrange(1, 2500))]
        if index % 3:
            result = await collect(client, prompt, max_tokens=8)
            assert result.token_ids == predicted(prompt, 8)
            return
        try:
            async with asyncio.timeout(rng.uniform(0, 0.5)):
                await collect(client, prompt, max_tokens=2000)
        except TimeoutError:
            pass

    await asyncio.gather(*(one(index) for index in range(200)))
    await wait_all_available(client)


async def test_stop_tokens_and_one_token_requests(client):
    prompt = [1, 2, 3]
    tokens = predicted(prompt, 6)
    result = await collect(client, prompt, max_tokens=6, stop_token_ids=[tokens[3]])
    end = tokens.index(tokens[3]) + 1
    assert result.token_ids == tokens[:end]
    assert result.finished.choices[0].stop_token_id == tokens[3]
    first = await collect(client, prompt, max_tokens=6, stop_token_ids=[tokens[0]])
    assert first.token_ids == tokens[:1]
    one = await collect(client, prompt, max_tokens=1)
    assert one.token_ids == tokens[:1]
    assert one.finished.decode_node == ""
    await wait_all_available(client)
