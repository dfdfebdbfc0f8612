"""Two coordinators in front of the same nodes, and a client that knows both."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.child import Child
from coordinator.client import AsyncClient
from coordinator.events import Delta, GenerationError
from coordinator.supervisor import Cluster
from tests.e2e.serving import collect, predicted, wait_all_available, wait_until


@asynccontextmanager
async def programs(*commands: list[str]) -> AsyncIterator[list[Child]]:
    """Children that are listening."""
    children = [
        Child(command[0], [sys.executable, "-m", *command], log_path=None) for command in commands
    ]
    try:
        await asyncio.gather(*(child.read_address() for child in children))
        yield children
    finally:
        for child in children:
            child.kill()
        await asyncio.gather(*(child.exited for child in children))


@pytest.mark.parametrize("end", ["kill", "terminate"])
async def test_a_stream_goes_on_through_the_other_coordinator(end):
    coordinator = ["coordinator", "--listen", "127.0.0.1:0", "--model", "emulated"]
    async with programs(coordinator, coordinator) as coordinators, asyncio.timeout(40):
        both = [child.address for child in coordinators]
        flags = ["--model", "emulated", "--coordinator", both[0], "--coordinator", both[1]]
        async with (
            programs(["prefill_server", *flags], ["decode_server", *flags]),
            AsyncClient(both) as client,
            AsyncClient(both[1]) as other,
        ):
            await wait_until(other, lambda nodes: [n.state for n in nodes] == ["serving"] * 2)
            await wait_until(client, lambda nodes: [n.state for n in nodes] == ["serving"] * 2)
            token_ids, finished, text = [], None, ""
            async for event in client.generate([5] * 10, max_tokens=300, temperature=1.0):
                if not isinstance(event, Delta):
                    finished = event
                    continue
                assert event.position == 10 + len(token_ids)
                token_ids += event.token_ids
                text += event.text
                if len(token_ids) == 20:
                    getattr(coordinators[0], end)()
            assert token_ids == predicted([5] * 10, 300, seed=finished.seed)
            whole = await collect(
                other, [5] * 10, max_tokens=300, temperature=1.0, seed=finished.seed
            )
            assert text == whole.text
            await wait_all_available(other)


async def test_a_drained_node_ends_in_good_order_and_its_request_moves():
    async with (
        Cluster(
            model="emulated",
            num_prefill=1,
            num_decode=2,
            node_options={"drain_grace_s": 0.3},
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        request = asyncio.create_task(
            collect(client, [5] * 10, max_tokens=1_000, request_id="mine")
        )
        await wait_until(client, lambda nodes: any(n.num_decoding for n in nodes))
        paired = {event.what: event for event in await client.explain("mine")}["paired"]
        victim = paired.details["decode"].partition("#")[0]
        await client.drain_node(victim)
        assert await cluster.processes[victim].exited == 0
        result = await request
        assert result.token_ids == predicted([5] * 10, 1_000)
        assert result.finished.served_as == "resumed"
        assert result.finished.decode_node != victim
        story = [event.what for event in await client.explain("mine")]
        assert story[:5] == ["arrived", "queued", "paired", "reserved", "first token"]
        assert story[-1] == "ended"
        assert "broken" in story
        with pytest.raises(GenerationError, match="no node 'decode-9'"):
            await client.drain_node("decode-9")


async def test_text_becomes_tokens_and_tokens_text():
    async with (
        Cluster(model="emulated", num_prefill=0, num_decode=1) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        token_ids = await client.tokenize("h\u00e9llo")
        assert token_ids == list("h\u00e9llo".encode())
        assert await client.detokenize(token_ids) == "h\u00e9llo"
        with pytest.raises(GenerationError, match="ids are not in"):
            await client.detokenize([256])
