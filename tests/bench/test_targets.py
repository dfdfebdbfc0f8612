"""Against real servers: one of our protocol that answers from the prompt, and one of HTTP."""

import asyncio

import pytest

from bench.targets import OpenAITarget, OurTarget, spread
from tests.bench.http_stub import serve_http_stub
from tests.coordinator.fake_coordinator import serve_fake


async def ask_ours(prompt, num_tokens=3):
    chunks = []
    async with serve_fake() as fake:
        target = OurTarget(fake.address)
        try:
            return await target.ask(prompt, num_tokens, chunks), chunks, fake
        finally:
            await target.close()


async def ask_http(kind, num_tokens=3):
    chunks = []
    async with serve_http_stub() as stub:
        target = OpenAITarget(stub.url, model="m")
        try:
            return await target.ask([7] * kind, num_tokens, chunks), chunks, stub
        finally:
            await target.close()


async def test_our_tokens_are_counted_as_they_come_and_the_end_tells_the_rest():
    ending, chunks, fake = await ask_ours([5, 6, 7])
    assert [count for _, count in chunks] == [1, 1, 1]
    assert [at for at, _ in chunks] == sorted(at for at, _ in chunks)
    assert (ending.outcome, ending.error) == ("ok", "")
    request = fake.requests[0]
    assert (request.stop.max_tokens, request.stop.ignore_eos) == (3, True)
    assert (ending.num_prompt_tokens, ending.served_as) == (9, "disaggregated")


async def test_a_service_without_nodes_refuses():
    ending, chunks, _ = await ask_ours("refuse")
    assert (ending.outcome, chunks) == ("refused", [])
    assert ending.error == "NO_NODES: no decode node"


async def test_an_answer_without_an_end_has_failed():
    ending, chunks, _ = await ask_ours("cut")
    assert (ending.outcome, len(chunks)) == ("failed", 1)


async def test_nobody_at_the_address_is_a_failure_not_a_refusal():
    target = OurTarget("127.0.0.1:1")
    ending = await target.ask([1], 1, [])
    await target.close()
    assert ending.outcome == "failed"


async def test_a_cancelled_request_ends_on_the_server_too():
    async with serve_fake() as fake:
        target, chunks = OurTarget(fake.address), []
        task = asyncio.create_task(target.ask("hang", 3, chunks))
        async with asyncio.timeout(10):
            while not chunks:
                await asyncio.sleep(0.001)
            task.cancel()
            await fake.cancelled.wait()
        await target.close()
    assert len(chunks) == 1


async def test_the_model_tells_its_tokens_and_its_length():
    async with serve_fake() as fake:
        target = OurTarget(fake.address)
        assert await target.vocab() == range(8)
        assert await target.max_model_len() == 9
        await target.close()


async def test_a_count_in_every_event_tells_tokens_without_text():
    ending, chunks, stub = await ask_http(1)
    assert [count for _, count in chunks] == [1, 1, 1]
    assert (ending.outcome, ending.num_prompt_tokens, ending.num_cached) == ("ok", 1, 1)
    body = stub.bodies[0]
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", [7], 3)
    assert (body["stream"], body["ignore_eos"], body["temperature"]) == (True, True, 0.0)


async def test_merged_chunks_show_in_the_count_at_the_end():
    ending, chunks, _ = await ask_http(2)
    assert ending.outcome == "ok"
    assert [count for _, count in chunks] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "outcome", "error"),
    [
        (3, "refused", "HTTP 429"),
        (4, "failed", "HTTP 500"),
        (5, "failed", "out of memory"),
        (6, "failed", "RemoteProtocolError"),
    ],
)
async def test_what_an_http_server_does_wrong_is_told(kind, outcome, error):
    ending, _, _ = await ask_http(kind)
    assert ending.outcome == outcome
    assert error in ending.error


@pytest.mark.parametrize(
    ("counts", "num_tokens", "expected"),
    [
        ([1, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 1], 5, [1, 2, 2]),
        ([1, 1, 1], 6, [1, 2, 3]),
        ([1], 3, [3]),
        ([], 3, []),
        ([1, 1], 1, [1, 1]),
    ],
)
def test_a_surplus_is_spread_over_the_chunks_after_the_first(counts, num_tokens, expected):
    chunks = [(float(index), count) for index, count in enumerate(counts)]
    spread(chunks, num_tokens)
    assert [count for _, count in chunks] == expected
