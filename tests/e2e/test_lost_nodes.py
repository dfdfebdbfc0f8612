"""Nodes that die, freeze or come back, and clients that do not read: streams go on."""

import asyncio
import signal

import grpc.aio
import pytest

from coordinator.client import AsyncClient
from coordinator.events import Delta, GenerationError, PromptLogprobs
from coordinator.supervisor import Cluster
from protos.pd.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from protos.serving import dial
from tests.e2e.serving import collect, predicted, wait_all_available, wait_until


def emulated() -> Cluster:
    return Cluster(model="emulated", num_prefill=1, num_decode=1)


async def running_on(client: AsyncClient, node_id: str) -> None:
    """Returns once the node has a request."""
    await wait_until(
        client, lambda nodes: any(n.node_id == node_id and n.num_running for n in nodes)
    )


async def test_without_its_prefill_node_a_request_goes_on_locally():
    async with emulated() as cluster, AsyncClient(cluster.address) as client:
        # 15,000 tokens prefill for a second.
        request = asyncio.create_task(collect(client, [5] * 15_000, max_tokens=20))
        await running_on(client, "prefill-0")
        cluster.processes["prefill-0"].kill()
        result = await request
        assert result.token_ids == predicted([5] * 15_000, 20)
        assert result.finished.served_as == "resumed"
        assert result.finished.served_as_reason == "no prefill node"
        assert result.finished.num_restarts == 1
        await wait_all_available(client)


async def test_prompt_logprobs_come_once_though_the_prompt_is_computed_twice():
    async with emulated() as cluster, AsyncClient(cluster.address) as client:
        positions, token_ids = [], []
        async for event in client.generate([5] * 12_000, max_tokens=3, prompt_logprobs=0):
            if isinstance(event, PromptLogprobs):
                if not positions:
                    cluster.processes["prefill-0"].kill()
                positions += range(event.position, event.position + len(event.tokens))
            elif isinstance(event, Delta):
                token_ids += event.token_ids
        assert positions == list(range(1, 12_000))
        assert token_ids == predicted([5] * 12_000, 3)
        await wait_all_available(client)


async def test_a_stream_goes_on_when_its_only_decode_node_is_started_again():
    async with emulated() as cluster, AsyncClient(cluster.address) as client:
        token_ids, finished = [], None
        async for event in client.generate([5] * 10, max_tokens=200):
            if isinstance(event, Delta):
                token_ids += event.token_ids
                if len(token_ids) == 5:
                    cluster.processes["decode-0"].kill()
                    await cluster.processes["decode-0"].exited
                    await cluster.start_node("decode-0")
            else:
                finished = event
        assert token_ids == predicted([5] * 10, 200)
        assert finished.served_as == "resumed"
        await wait_all_available(client)


async def test_without_any_decode_node_a_request_ends_with_a_typed_error():
    async with emulated() as cluster, AsyncClient(cluster.address) as client:
        request = asyncio.create_task(collect(client, [5] * 10, max_tokens=9_000, timeout_s=3))
        await running_on(client, "decode-0")
        cluster.processes["decode-0"].kill()
        with pytest.raises(GenerationError) as error:
            await request
        assert error.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_all_available(client)


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("moment", ["before the request", "while it runs"])
async def test_a_node_that_is_frozen_is_noticed_and_comes_back(victim: str, moment: str):
    """A frozen node answers no call and ends no stream; only its silence tells."""
    async with emulated() as cluster, AsyncClient(cluster.address) as client:
        node = cluster.processes[victim]
        if moment == "before the request":
            node.send_signal(signal.SIGSTOP)
        request = asyncio.create_task(collect(client, [5] * 15_000, max_tokens=20))
        if moment == "while it runs":
            await running_on(client, victim)
            node.send_signal(signal.SIGSTOP)
        await wait_until(client, lambda nodes: victim not in {n.node_id for n in nodes})
        node.send_signal(signal.SIGCONT)
        result = await request
        assert result.token_ids == predicted([5] * 15_000, 20)
        assert result.finished.served_as == "resumed"
        await wait_until(client, lambda nodes: [n.state for n in nodes] == ["serving"] * 2)
        result = await collect(client, [1, 2, 3], max_tokens=3)
        assert result.finished.served_as == "disaggregated"
        await wait_all_available(client)


async def test_a_node_that_is_started_again_takes_the_place_of_its_old_life():
    async with emulated() as cluster, AsyncClient(cluster.address) as client:
        first = await collect(client, [1, 2, 3], max_tokens=3)
        cluster.processes["decode-0"].kill()
        await cluster.processes["decode-0"].exited
        await cluster.start_node("decode-0")
        await cluster.wait_serving()
        again = await collect(client, [1, 2, 3], max_tokens=3)
        assert again.token_ids == first.token_ids
        assert again.finished.served_as == "disaggregated"


async def test_a_second_node_of_the_same_id_replaces_the_first_which_learns_of_it():
    """Both would otherwise think that they are registered. They take turns, which logs tell of."""
    async with emulated() as cluster, AsyncClient(cluster.address) as client:
        first = cluster.processes["decode-0"]
        second = await cluster.start_node("decode-0")
        await wait_until(client, lambda nodes: any(n.address == second.address for n in nodes))
        await wait_until(client, lambda nodes: any(n.address == first.address for n in nodes))
        second.kill()
        first.kill()
        await asyncio.wait([first.exited, second.exited])


async def test_a_deadline_frees_the_nodes_of_a_client_that_does_not_read():
    async with (
        emulated() as cluster,
        AsyncClient(cluster.address) as client,
        dial(cluster.address, purpose="test") as channel,
    ):
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[1]),
            stop=types_pb2.StopConditions(max_tokens=30_000),
        )
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=2)
        await running_on(client, "decode-0")
        await wait_all_available(client)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in call:
                pass
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
