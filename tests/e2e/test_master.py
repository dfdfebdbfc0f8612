"""The master test: whatever is split, batched or chunked, the tokens are transformers' own.

The real model in float32, real processes. Greedy tokens against transformers' logits at every
position; sampled runs against each other.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from coordinator.client import AsyncClient
from coordinator.supervisor import Cluster
from engine.catalog import resolve_model
from tests.e2e.prompts import BLOCK_SIZE, make_prompts
from tests.e2e.serving import collect, near_ties, wait_all_available
from tests.models import reference_model

MODEL = "smollm2-135m"
NUM_TOKENS = 18
AT_ONCE = 8
NODE_OPTIONS = {
    "model": MODEL,
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "kv_memory_gb": 1.5,
    # Short, so that prompts from about 100 tokens on take several chunks.
    "step_budget_ms": 20,
}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield reference_model(resolve_model(MODEL, allow_download=True).folder)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    folder = resolve_model(MODEL, allow_download=True).folder
    return make_prompts(Tokenizer.from_file(str(folder / "tokenizer.json")))


def cluster(*, num_prefill: int) -> Cluster:
    return Cluster(
        model=MODEL,
        num_prefill=num_prefill,
        num_decode=1,
        node_options=NODE_OPTIONS,
        coordinator_options={"local_prefill": "never"},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients() -> AsyncIterator[tuple[AsyncClient, AsyncClient]]:
    """Of a disaggregated cluster and of a colocated one, side by side: one core each at a time."""
    async with (
        cluster(num_prefill=1) as split,
        cluster(num_prefill=0) as whole,
        AsyncClient(split.address) as disaggregated,
        AsyncClient(whole.address) as colocated,
    ):
        yield disaggregated, colocated


async def generate_all(
    client: AsyncClient, prompts: list[list[int]], *, at_once: int, served_as: str, **options: Any
) -> list[list[int]]:
    limit = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> list[int]:
        async with limit:
            result = await collect(client, prompt, **{"max_tokens": NUM_TOKENS, **options})
        assert result.finished.served_as == served_as, result.finished
        assert result.finished.prompt_tokens == len(prompt)
        assert len(result.token_ids) == (options.get("max_tokens") or NUM_TOKENS)
        return result.token_ids

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


async def test_disaggregated_and_colocated_equal_transformers(clients, reference, prompts):
    disaggregated, colocated = clients
    greedy = {"at_once": AT_ONCE, "ignore_eos": True}
    split, whole = await asyncio.gather(
        generate_all(disaggregated, prompts, served_as="disaggregated", **greedy),
        generate_all(colocated, prompts, served_as="local", **greedy),
    )
    # After a near tie the two go on with different texts; each of them is checked to its end.
    num_ties = sum(
        near_ties(reference, prompt, tokens)
        for prompt, *both in zip(prompts, split, whole, strict=True)
        for tokens in {tuple(tokens) for tokens in both}
    )
    print(f"{len(prompts)} prompts, {num_ties} near ties")


async def test_sampled_runs_are_equal_however_they_are_served(clients, prompts):
    disaggregated, colocated = clients
    sample = {"temperature": 0.8, "seed": 1234, "ignore_eos": True, "max_tokens": 12}
    chosen = prompts[:6]
    first, local = await asyncio.gather(
        generate_all(disaggregated, chosen, at_once=4, served_as="disaggregated", **sample),
        generate_all(colocated, chosen, at_once=3, served_as="local", **sample),
    )
    again = await generate_all(
        disaggregated, chosen, at_once=8, served_as="disaggregated", **sample
    )
    assert first == again
    assert first == local


async def test_a_drawn_seed_reproduces_its_run(clients, prompts):
    disaggregated, _ = clients
    options = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 12, "ignore_eos": True}
    first = await collect(disaggregated, prompts[0], **options)
    again = await collect(disaggregated, prompts[0], seed=first.finished.seed, **options)
    assert again.token_ids == first.token_ids


@pytest.mark.slow
async def test_a_third_of_200_requests_cancelled_at_random_moments_leaks_nothing(clients, prompts):
    rng = random.Random(3)

    async def one(client: AsyncClient, index: int) -> None:
        prompt = rng.choice(prompts[:-3])
        try:
            async with asyncio.timeout(rng.uniform(0, 20) if index % 3 == 0 else None):
                await collect(client, prompt, max_tokens=8, ignore_eos=True)
        except TimeoutError:
            pass

    for client in clients:
        await asyncio.gather(*(one(client, index) for index in range(200)))
        await wait_all_available(client)


async def test_every_block_is_available_in_the_end(clients):
    for client in clients:
        await wait_all_available(client)
