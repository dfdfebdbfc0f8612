"""Registration: nobody is missed, whatever happens while a message goes out; drained and stuck
nodes get nothing new."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.cluster_service import ClusterServicer
from coordinator.need import Need
from coordinator.pairing import choose_pair
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
SERVING, DRAINING = cluster_pb2.NODE_STATE_SERVING, cluster_pb2.NODE_STATE_DRAINING
NEED = Need(num_prompt_tokens=9, max_num_tokens=20)


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
        self._seq = 0

    async def next(self) -> cluster_pb2.RegisterResponse:
        async with asyncio.timeout(1):
            return await anext(self._responses)

    async def members(self) -> list[str]:
        response = await self.next()
        return sorted(member.node.node_id for member in response.membership.members)

    def send(self, state: int = SERVING, **status: object) -> None:
        """A later status."""
        self._seq += 1
        sent = cluster_pb2.NodeStatus(seq=self._seq, state=state, available_blocks=9, **status)
        self.requests.put_nowait(cluster_pb2.RegisterRequest(status=sent))

    async def tell(self, state: int = SERVING, **status: object) -> None:
        """A later status, which has been taken in when this returns."""
        self.send(state, **status)
        async with asyncio.timeout(1):
            await self.requests.join()

    async def tell_cache(self, **events: object) -> None:
        """Cache events, which have been taken in when this returns."""
        sent = cluster_pb2.CacheEvents(**events)
        self.requests.put_nowait(cluster_pb2.RegisterRequest(cache=sent))
        async with asyncio.timeout(1):
            await self.requests.join()

    async def close(self) -> None:
        await self._responses.aclose()

    async def _read(self) -> AsyncIterator[cluster_pb2.RegisterRequest]:
        while (request := await self.requests.get()) is not None:
            yield request
            # Taken in: the servicer has come back for the next one.
            self.requests.task_done()


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


def chosen(registry: Registry) -> tuple[str, str]:
    """Names of the pair that a request gets; "" for none."""
    pair = choose_pair(registry.nodes.values(), NEED)
    assert pair is not None
    return (
        pair.prefill.key.node_id if pair.prefill else "",
        pair.decode.key.node_id if pair.decode else "",
    )


@asynccontextmanager
async def cluster(servicer: ClusterServicer) -> AsyncIterator[dict[str, NodeStream]]:
    """p0, d0 and d1, all serving; every one has heard of all."""
    streams: dict[str, NodeStream] = {}
    for name in ("p0", "d0", "d1"):
        role = PREFILL if name == "p0" else DECODE
        streams[name] = NodeStream(servicer, registration(name, role, max_model_len=80))
        # The new one first: that is what registers it.
        for stream in reversed(streams.values()):
            assert await stream.members() == sorted(streams)
    # d0 before d1: it has fewer streams.
    await streams["p0"].tell()
    await streams["d0"].tell()
    await streams["d1"].tell(num_decoding=1)
    try:
        yield streams
    finally:
        for stream in streams.values():
            await stream.close()


async def test_a_drained_node_gets_nothing_new_and_hears_of_it_once(servicer, registry):
    async with cluster(servicer) as streams:
        assert chosen(registry) == ("p0", "d0")
        hearing = asyncio.create_task(streams["d0"].next())
        await asyncio.sleep(0)
        await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node_id="d0"), None)
        # From now on, whether or not the node has heard of it.
        assert chosen(registry) == ("p0", "d1")
        assert (await hearing).WhichOneof("event") == "drain"
        # It has not yet, and says that it serves.
        await streams["d0"].tell()
        assert chosen(registry) == ("p0", "d1")
        listed = await servicer.ListNodes(cluster_pb2.ListNodesRequest(), None)
        states = {n.registration.node.node_id: n.status.state for n in listed.nodes}
        assert states == {"p0": SERVING, "d0": DRAINING, "d1": SERVING}
        # Asked again it is told nothing more: its next message is of who is there.
        following = asyncio.create_task(streams["d0"].members())
        await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node_id="d0"), None)
        await streams["d0"].tell()
        await streams.pop("d1").close()
        assert await following == ["d0", "p0"]


async def test_the_last_decode_node_can_be_drained(servicer, registry):
    async with cluster(servicer):
        for name in ("d0", "d1"):
            await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node_id=name), None)
        with pytest.raises(ServingError, match="no decode node is serving"):
            choose_pair(registry.nodes.values(), NEED)


async def test_draining_wakes_those_who_wait_for_another_pair(servicer, registry):
    async with cluster(servicer):
        changes: list[str] = []
        registry.listen(lambda: changes.append("changed"))
        await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node_id="p0"), None)
        assert changes == ["changed"]
        assert chosen(registry) == ("", "d0")


async def test_a_node_that_drains_by_itself_gets_nothing_new(servicer, registry):
    async with cluster(servicer) as streams:
        await streams["d0"].tell(DRAINING)
        assert chosen(registry) == ("p0", "d1")


async def test_a_drained_node_that_starts_anew_serves(servicer, registry):
    async with cluster(servicer) as streams:
        await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node_id="d0"), None)
        await streams.pop("d0").close()
        again = types_pb2.NodeRef(node_id="d0", incarnation=2)
        streams["d0"] = NodeStream(servicer, registration("d0", DECODE, node=again))
        await streams["d0"].members()
        await streams["d0"].tell()
        assert chosen(registry) == ("p0", "d0")


async def test_an_unknown_node_is_named_and_not_drained(servicer):
    with pytest.raises(ServingError, match="no node 'x' is registered") as error:
        await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node_id="x"), None)
    assert error.value.reason is Reason.UNKNOWN_NODE
    assert error.value.metadata == {"field": "node_id"}


def duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


# Twenty times the prediction, and never less than 5 s.
@pytest.mark.parametrize(
    ("predicted_s", "age_s", "is_stuck"),
    [(0.1, 5, False), (0.1, 5.1, True), (2, 40, False), (2, 40.1, True)],
)
async def test_a_node_that_is_stuck_in_a_step_is_taken_out(
    servicer, registry, predicted_s, age_s, is_stuck
):
    async with cluster(servicer) as streams:
        lost: list[str] = []
        registry.nodes["d0"].on_lost.add(lambda: lost.append("d0"))
        ending = asyncio.create_task(streams["d0"].next())
        streams["d0"].send(step_age=duration(age_s), step_predicted=duration(predicted_s))
        if is_stuck:
            with pytest.raises(ServingError, match=f"stuck: .* has taken {age_s:.1f} s") as error:
                await ending
            assert error.value.reason is Reason.NODE_LOST
            assert (lost, sorted(registry.nodes)) == (["d0"], ["d1", "p0"])
            assert chosen(registry) == ("p0", "d1")
            assert await streams["p0"].members() == ["d1", "p0"]
        else:
            await streams["d0"].requests.join()
            assert (lost, chosen(registry)) == ([], ("p0", "d0"))
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)


# Hashes use all 64 bits.
CHAIN = (2**64 - 1, 2**63, 3)


async def test_cache_events_make_the_index_of_their_node(servicer, registry):
    async with cluster(servicer) as streams:
        await streams["d0"].tell_cache(seq=0, is_snapshot=True, added=CHAIN[:1])
        await streams["d0"].tell_cache(seq=1, added=CHAIN[1:])
        assert registry.nodes["d0"].index.longest(CHAIN) == 3
        assert registry.nodes["d1"].index.longest(CHAIN) == 0
        await streams["d0"].tell_cache(seq=3, evicted=CHAIN[2:])
        assert registry.nodes["d0"].index.longest(CHAIN) == 2


async def test_a_gap_in_cache_events_asks_for_all_of_them_once(servicer, registry):
    async with cluster(servicer) as streams:
        await streams["d0"].tell_cache(seq=0, is_snapshot=True, added=CHAIN)
        hearing = asyncio.create_task(streams["d0"].next())
        await asyncio.sleep(0)
        await streams["d0"].tell_cache(seq=4, evicted=CHAIN[2:])
        assert (await hearing).WhichOneof("event") == "resync_cache"
        assert registry.nodes["d0"].index.longest(CHAIN) == 0
        # What was on its way asks for nothing more: the next message is of who is there.
        following = asyncio.create_task(streams["d0"].members())
        await streams["d0"].tell_cache(seq=5, added=CHAIN[2:])
        await streams["d0"].tell_cache(seq=6, is_snapshot=True, added=CHAIN[:2])
        assert registry.nodes["d0"].index.longest(CHAIN) == 2
        await streams.pop("d1").close()
        assert await following == ["d0", "p0"]


async def test_a_node_that_tells_of_more_than_its_blocks_must_begin_again(servicer, registry):
    async with cluster(servicer) as streams:
        hearing = asyncio.create_task(streams["d0"].next())
        await asyncio.sleep(0)
        await streams["d0"].tell_cache(seq=0, is_snapshot=True, added=range(10))
        assert (await hearing).WhichOneof("event") == "resync_cache"
        assert len(registry.nodes["d0"].index) == 0


async def test_a_node_that_registers_again_has_nothing_cached(servicer, registry):
    async with cluster(servicer) as streams:
        await streams["d0"].tell_cache(seq=0, is_snapshot=True, added=CHAIN)
        await streams.pop("d0").close()
        streams["d0"] = NodeStream(servicer, registration("d0", DECODE))
        await streams["d0"].members()
        assert registry.nodes["d0"].index.longest(CHAIN) == 0


async def test_a_clear_that_a_node_does_not_answer_is_an_error(servicer, monkeypatch):
    monkeypatch.setattr("coordinator.cluster_service.SILENCE_S", 0.01)
    async with cluster(servicer):
        with pytest.raises(ServingError, match="d0#1 did not answer") as error:
            await servicer.ClearCache(cluster_pb2.ClearCacheRequest(node_id="d0"), None)
        assert error.value.reason is Reason.NODE_LOST


async def test_a_node_is_told_to_clear_its_cache_and_waited_for(servicer):
    async with cluster(servicer) as streams:
        hearing = asyncio.create_task(streams["d0"].next())
        await asyncio.sleep(0)
        request = cluster_pb2.ClearCacheRequest(node_id="d0")
        clearing = asyncio.create_task(servicer.ClearCache(request, None))
        assert (await hearing).WhichOneof("event") == "clear_cache"
        await streams["d0"].tell_cache(seq=0, is_snapshot=True)
        async with asyncio.timeout(1):
            await clearing
        with pytest.raises(ServingError, match="no node 'x' is registered") as error:
            await servicer.ClearCache(cluster_pb2.ClearCacheRequest(node_id="x"), None)
        assert error.value.reason is Reason.UNKNOWN_NODE
