"""Registration: nobody is missed, whatever happens while a message goes out."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.cluster_service import ClusterServicer
from coordinator.registry import Registry
from kvtransfer.layout import KvLayout
from kvtransfer.wire import layout_to_pb
from protos.errors import Reason, ServingError
from protos.pd.v1 import cluster_pb2, types_pb2

LAYOUT = KvLayout(
    model="m",
    model_digest="00",
    dtype="float32",
    block_size=10,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
PREFILL, DECODE = cluster_pb2.NODE_ROLE_PREFILL, cluster_pb2.NODE_ROLE_DECODE


def registration(node_id: str, role: int = PREFILL, **changes: object) -> cluster_pb2.Registration:
    fields = {
        "protocol_version": 1,
        "node": types_pb2.NodeRef(node_id=node_id, incarnation=1),
        "role": role,
        "address": "127.0.0.1:1",
        "layout": layout_to_pb(LAYOUT),
        "num_blocks": 9,
        "max_model_len": 99,
        "max_running": 9,
    }
    return cluster_pb2.Registration(**(fields | changes))


class NodeStream:
    """A node's side of Register, without a connection: requests from a queue, responses by hand."""

    def __init__(self, servicer: ClusterServicer, first: cluster_pb2.Registration) -> None:
        self.requests: asyncio.Queue[cluster_pb2.RegisterRequest | None] = asyncio.Queue()
        self.requests.put_nowait(cluster_pb2.RegisterRequest(registration=first))
        self._responses = servicer.Register(self._read(), None)

    async def members(self) -> list[str]:
        response = await anext(self._responses)
        return sorted(member.node.node_id for member in response.membership.members)

    async def _read(self) -> AsyncIterator[cluster_pb2.RegisterRequest]:
        while (request := await self.requests.get()) is not None:
            yield request


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def servicer(registry: Registry) -> ClusterServicer:
    return ClusterServicer(registry, model="m")


async def test_a_node_that_registers_while_another_is_written_to_is_announced_to_it(servicer):
    first = NodeStream(servicer, registration("a"))
    assert await first.members() == ["a"]
    # The first handler is in its yield now, as it is while gRPC writes.
    second = NodeStream(servicer, registration("b", DECODE))
    assert await second.members() == ["a", "b"]
    async with asyncio.timeout(1):
        assert await first.members() == ["a", "b"]


async def test_a_stream_that_ends_while_it_is_written_to_takes_its_node_out(servicer, registry):
    stream = NodeStream(servicer, registration("a"))
    await stream.members()
    stream.requests.put_nowait(None)
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        with pytest.raises(StopAsyncIteration):
            await stream.members()
    assert not registry.nodes


async def test_the_old_stream_of_a_node_that_registers_again_ends(servicer, registry):
    old = NodeStream(servicer, registration("a"))
    await old.members()
    ending = asyncio.create_task(old.members())
    await asyncio.sleep(0)
    new = NodeStream(
        servicer, registration("a", node=types_pb2.NodeRef(node_id="a", incarnation=2))
    )
    await new.members()
    async with asyncio.timeout(1):
        with pytest.raises(ServingError, match="registered again"):
            await ending
    assert registry.nodes["a"].key.incarnation == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 2}, Reason.PROTOCOL_MISMATCH),
        ({"layout": types_pb2.KvLayout(model="m")}, Reason.INVALID_ARGUMENT),
        ({"role": 0}, Reason.INVALID_ARGUMENT),
        ({"role": 7}, Reason.INVALID_ARGUMENT),
        ({"address": ""}, Reason.INVALID_ARGUMENT),
        ({"node": types_pb2.NodeRef()}, Reason.INVALID_ARGUMENT),
    ],
)
async def test_a_registration_that_can_never_be_paired_is_refused(servicer, changes, reason):
    with pytest.raises(ServingError) as error:
        await NodeStream(servicer, registration("a", **changes)).members()
    assert error.value.reason is reason


async def test_a_node_that_says_nothing_first_is_refused(servicer):
    stream = NodeStream(servicer, registration("a"))
    stream.requests.get_nowait()
    stream.requests.put_nowait(None)
    with pytest.raises(ServingError, match="message was due"):
        await stream.members()
