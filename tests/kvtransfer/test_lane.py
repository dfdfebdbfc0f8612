"""A lane over real sockets: both ends in this process, each with a pool and memory of its own."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvtransfer.blocks import BlockPool
from kvtransfer.dialer import LaneDialer
from kvtransfer.inbox import Inbox
from kvtransfer.lane_service import LaneServicer
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory
from kvtransfer.messages import FirstToken, NodeKey
from protos.errors import Reason, ServingError
from protos.pd.v1 import lane_pb2_grpc
from protos.serving import GrpcServer

P = NodeKey(node_id="prefill-0", incarnation=1)
D = NodeKey(node_id="decode-0", incarnation=2)
# 96 KiB per block: a chunk of 42 blocks is several pieces, 100 blocks are several chunks.
LAYOUT = KvLayout(
    model="tiny",
    model_digest="00" * 32,
    dtype="float32",
    block_size=16,
    num_layers=6,
    num_kv_heads=2,
    head_dim=64,
)
FIRST = (FirstToken(choice=0, position=9, token_id=4),)


class Pair:
    """A prefill side (dialer) and a decode side (server), 128 blocks each."""

    def __init__(
        self,
        *,
        layout: KvLayout = LAYOUT,
        receive_layout: KvLayout = LAYOUT,
        members: tuple[NodeKey, ...] = (P,),
        plane: str = "grpc",
    ) -> None:
        self.planes = [plane]
        # Addresses of receivers elsewhere.
        self.others: dict[NodeKey, str] = {}
        self.send_pool, self.receive_pool = BlockPool(128), BlockPool(128)
        self.send_memory = HostMemory(layout, 128)
        self.receive_memory = HostMemory(receive_layout, 128)
        self.inbox = Inbox()
        self.members = members

    async def __aenter__(self) -> "Pair":
        async def is_prefill_node(node: NodeKey) -> bool:
            return node in self.members

        async def resolve(node: NodeKey) -> str | None:
            return self.address if node == D else self.others.get(node)

        self.lanes = LaneServicer(
            me=D,
            inbox=self.inbox,
            pool=self.receive_pool,
            memory=self.receive_memory,
            is_prefill_node=is_prefill_node,
            planes=self.planes,
        )
        self.server = GrpcServer()
        lane_pb2_grpc.add_LaneServiceServicer_to_server(self.lanes, self.server.server)
        self.address = await self.server.start("127.0.0.1:0")
        self.dialer = LaneDialer(
            me=P,
            pool=self.send_pool,
            memory=self.send_memory,
            resolve=resolve,
            planes=self.planes,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.dialer.close()
        await self.server.stop(grace_s=0)
        self.lanes.close()

    def expect(
        self, num_blocks: int, *, num_tokens: int | None = None, prefix: Sequence[bytes] = ()
    ):
        ended = asyncio.get_running_loop().create_future()
        lease = self.receive_pool.reserve(num_blocks, prefix=prefix)
        num_tokens = num_tokens or num_blocks * LAYOUT.block_size
        transfer = self.inbox.expect(
            lease,
            num_tokens=num_tokens,
            num_cached_tokens=lease.num_cached * LAYOUT.block_size,
            on_end=ended.set_result,
        )
        return transfer, ended

    def compute(self, lease, first_block: int, num_blocks: int) -> None:
        block_ids = lease.block_ids[first_block : first_block + num_blocks]
        self.send_pool.begin_write(lease, block_ids, writer="engine")
        for index in block_ids:
            self.send_memory.block(index)[:] = os.urandom(self.send_memory.layout.block_bytes)
        self.send_pool.end_write(block_ids, writer="engine")

    async def send(self, transfer_id: bytes, num_blocks: int, *, num_tokens: int | None = None):
        lane = await self.dialer.lane_to(D)
        lease = self.send_pool.reserve(num_blocks)
        ended = asyncio.get_running_loop().create_future()
        num_tokens = num_tokens or num_blocks * self.send_memory.layout.block_size
        outgoing = lane.begin(
            transfer_id, lease=lease, num_tokens=num_tokens, on_end=ended.set_result
        )
        return lane, lease, outgoing, ended


async def all_available(pool: BlockPool) -> None:
    while pool.counts().available != pool.num_blocks:
        await asyncio.sleep(0)


@pytest.mark.parametrize("plane", ["grpc", "gloo"])
@pytest.mark.parametrize("num_blocks", [1, 41, 42, 43, 100])
async def test_blocks_arrive_byte_for_byte(num_blocks, plane):
    async with Pair(plane=plane) as pair, asyncio.timeout(20):
        incoming, received = pair.expect(num_blocks)
        lane, lease, outgoing, sent = await pair.send(incoming.transfer_id, num_blocks)
        half = num_blocks // 2
        for first, count in ((0, half), (half, num_blocks - half)):
            if count:
                pair.compute(lease, first, count)
                lane.offer(outgoing, first_block=first, num_blocks=count)
        lane.commit(outgoing, num_blocks=num_blocks, first_tokens=FIRST)
        assert await received is None
        assert await sent is None
        assert incoming.first_tokens == FIRST
        for ours, theirs in zip(lease.block_ids, incoming.lease.block_ids, strict=True):
            assert pair.send_memory.block(ours) == pair.receive_memory.block(theirs)
        pair.send_pool.release(lease)
        pair.receive_pool.release(incoming.lease)
        await all_available(pair.send_pool)
        await all_available(pair.receive_pool)


@pytest.mark.parametrize("plane", ["grpc", "gloo"])
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_an_abort_in_the_middle_frees_both_sides_and_the_lane_goes_on(side, plane):
    async with Pair(plane=plane) as pair, asyncio.timeout(20):
        incoming, received = pair.expect(100)
        lane, lease, outgoing, sent = await pair.send(incoming.transfer_id, 100)
        pair.compute(lease, 0, 90)
        lane.offer(outgoing, first_block=0, num_blocks=90)
        if side == "sender":
            lane.abort(outgoing, "cancelled")
        else:
            while not incoming.in_flight:
                await asyncio.sleep(0)
            pair.lanes.abort(incoming, "cancelled")
        assert await sent == "cancelled"
        # A sender's abort that the receiver has no READY for leaves the transfer expected.
        pair.lanes.abort(incoming, "cancelled")
        assert await received == "cancelled"
        pair.send_pool.release(lease)
        pair.receive_pool.release(incoming.lease)
        await all_available(pair.send_pool)
        await all_available(pair.receive_pool)
        assert await pair.dialer.lane_to(D) is lane


async def test_a_layout_that_differs_is_refused_by_name():
    async with Pair(layout=replace(LAYOUT, dtype="bfloat16")) as pair:
        with pytest.raises(ServingError) as error:
            await pair.dialer.lane_to(D)
    assert error.value.reason is Reason.LAYOUT_MISMATCH
    assert error.value.metadata["field"] == "dtype"


async def test_a_node_that_is_not_registered_is_refused():
    async with Pair(members=()) as pair:
        with pytest.raises(ServingError) as error:
            await pair.dialer.lane_to(D)
    assert error.value.reason is Reason.UNKNOWN_NODE


async def test_a_target_that_is_not_registered_is_not_dialled():
    async with Pair() as pair:
        with pytest.raises(ServingError) as error:
            await pair.dialer.lane_to(NodeKey(node_id="decode-0", incarnation=3))
    assert error.value.reason is Reason.UNKNOWN_NODE


@pytest.mark.parametrize("plane", ["grpc", "gloo"])
async def test_a_lost_receiver_ends_transfers_and_the_next_lane_is_new(plane):
    async with Pair(plane=plane) as pair, asyncio.timeout(20):
        incoming, received = pair.expect(2)
        lane, lease, outgoing, sent = await pair.send(incoming.transfer_id, 2)
        pair.compute(lease, 0, 1)
        lane.offer(outgoing, first_block=0, num_blocks=1)
        while not incoming.received:
            await asyncio.sleep(0)
        pair.lanes.forget(set())
        assert "no member" in (await received)
        assert "lane lost" in (await sent)
        assert await pair.dialer.lane_to(D) is not lane
        pair.send_pool.release(lease)
        await all_available(pair.send_pool)
