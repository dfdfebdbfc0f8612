"""A peer that breaks the protocol, over real sockets: lane and transfers end, nothing hangs."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from test_lane import LAYOUT, D, P, Pair

from kvtransfer.lane_service import LaneServicer
from kvtransfer.wire import layout_to_pb, node_to_pb
from protos.pd.v1 import lane_pb2, lane_pb2_grpc, types_pb2
from protos.serving import PROTOCOL_VERSION, dial


class RawLane:
    """The sending end of a lane without a state machine: says whatever it is told to."""

    def __init__(self, address: str) -> None:
        self._channel = dial(address, purpose="test")
        self._outbox: asyncio.Queue[lane_pb2.LaneRequest] = asyncio.Queue()
        hello = lane_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            sender=node_to_pb(P),
            receiver=node_to_pb(D),
            layout=layout_to_pb(LAYOUT),
            planes=["grpc"],
        )
        self.say(hello=hello)
        self.responses = aiter(lane_pb2_grpc.LaneServiceStub(self._channel).Lane(self._requests()))

    def say(self, **event: object) -> None:
        self._outbox.put_nowait(lane_pb2.LaneRequest(**event))

    async def close(self) -> None:
        await self._channel.close()

    async def _requests(self) -> AsyncIterator[lane_pb2.LaneRequest]:
        while True:
            yield await self._outbox.get()


def commit(transfer_id: bytes, **run: object) -> lane_pb2.Commit:
    return lane_pb2.Commit(
        transfer_id=transfer_id, num_blocks=1, runs=[types_pb2.TokenRun(token_ids=[1], **run)]
    )


def ready(transfer_id: bytes, **changes: object) -> lane_pb2.Ready:
    fields = {"num_blocks": 1, "size_bytes": LAYOUT.block_bytes, "transfer_id": transfer_id}
    return lane_pb2.Ready(**(fields | changes))


@pytest.mark.parametrize(
    "make",
    [
        lambda transfer_id: {"commit": commit(transfer_id, finish_reason=9)},
        lambda transfer_id: {"commit": lane_pb2.Commit(runs=[types_pb2.TokenRun()])},
        lambda transfer_id: {"ready": ready(transfer_id, seq=77)},
        lambda transfer_id: {"ready": ready(transfer_id, size_bytes=1)},
        lambda transfer_id: {"ready": ready(transfer_id, num_blocks=2**32 - 1)},
        lambda transfer_id: {"ready": ready(transfer_id, wire_dtype="int8")},
        lambda transfer_id: {"sent": lane_pb2.Sent(seq=0)},
        lambda transfer_id: {"hello": lane_pb2.Hello()},
        lambda transfer_id: {},
    ],
)
async def test_a_message_against_the_protocol_ends_the_lane_and_its_transfers(make):
    async with Pair() as pair, asyncio.timeout(10):
        incoming, ended = pair.expect(1)
        lane = RawLane(pair.address)
        assert (await anext(lane.responses)).welcome.epoch == 1
        pair.inbox.find(incoming.transfer_id, sender=P)
        lane.say(**make(incoming.transfer_id))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(lane.responses)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await ended is not None
        await lane.close()


async def test_a_lane_that_was_replaced_leaves_the_transfers_of_the_new_one_alone():
    async with Pair() as pair, asyncio.timeout(10):
        old = RawLane(pair.address)
        await anext(old.responses)
        new = RawLane(pair.address)
        assert (await anext(new.responses)).welcome.epoch == 2
        incoming, ended = pair.expect(1)
        pair.inbox.find(incoming.transfer_id, sender=P)
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(old.responses)
        new.say(ready=ready(incoming.transfer_id))
        assert (await anext(new.responses)).grant.seq == 0
        assert not ended.done()
        await old.close()
        await new.close()


async def test_a_plane_that_ends_ends_the_lane_and_closing_it_does_not_raise(monkeypatch):
    async def plane(self, requests, context):
        await anext(requests)
        return lane_pb2.PlaneResponse()

    monkeypatch.setattr(LaneServicer, "Plane", plane)
    async with Pair() as pair, asyncio.timeout(10):
        incoming, _ = pair.expect(1)
        lane, lease, outgoing, ended = await pair.send(incoming.transfer_id, 1)
        pair.compute(lease, 0, 1)
        lane.offer(outgoing, first_block=0, num_blocks=1)
        assert await ended is not None
        await lane.closed.wait()
