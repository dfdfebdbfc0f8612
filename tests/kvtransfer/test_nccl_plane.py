"""The nccl plane on CPU tensors: all of it but NCCL itself, between two nodes of this process."""

import asyncio
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from nccl_stand_in import GlooPair, open_gloo
from test_lane import FIRST, LAYOUT, D, Pair, all_available

from kvtransfer import incoming_lane, outgoing_lane
from kvtransfer.device_memory import DeviceMemory
from kvtransfer.nccl_plane import NcclPlaneReceiver, NcclPlaneSender
from kvtransfer.plane import PlaneError
from protos.errors import ServingError

# 96 KiB a block, 16 MiB a chunk: 170 blocks to a chunk; with 20 times the layers, 8.
TALL = replace(LAYOUT, num_layers=120)


class DevicePair(Pair):
    """Pair over device memory, where a GPU's would be."""

    def __init__(self, *, layout=LAYOUT, receive_layout=None, planes=("nccl",)):
        super().__init__(layout=layout, receive_layout=receive_layout or layout)
        self.planes = list(planes)
        self.send_memory = DeviceMemory(layout, 128, device=torch.device("cpu"))
        self.receive_memory = DeviceMemory(
            receive_layout or layout, 128, device=torch.device("cpu")
        )

    def compute(self, lease, first_block: int, num_blocks: int) -> None:
        block_ids = lease.block_ids[first_block : first_block + num_blocks]
        self.send_pool.begin_write(lease, block_ids, writer="engine")
        self.send_memory.pool[list(block_ids)] = torch.randn(
            len(block_ids), *self.send_memory.layout.block_shape
        )
        self.send_pool.end_write(block_ids, writer="engine")

    def sent_blocks(self, lease) -> torch.Tensor:
        return self.send_memory.pool[list(lease.block_ids)]

    def received_blocks(self, transfer) -> torch.Tensor:
        return self.receive_memory.pool[list(transfer.lease.block_ids)]


@pytest.fixture
def pairs(monkeypatch) -> list[GlooPair]:
    """Gloo in NCCL's place; the communicators that were opened."""
    opened: list[GlooPair] = []

    def open_group(store, rank):
        opened.append(open_gloo(store, rank))
        return opened[-1]

    sending, receiving = outgoing_lane.sending_plane, incoming_lane.receiving_plane
    monkeypatch.setattr(
        outgoing_lane,
        "sending_plane",
        lambda plane, link: (
            NcclPlaneSender(link, open_group=open_group)
            if plane == "nccl"
            else sending(plane, link)
        ),
    )
    monkeypatch.setattr(
        incoming_lane,
        "receiving_plane",
        lambda plane, link, *, on_arrived: (
            NcclPlaneReceiver(link, on_arrived=on_arrived, open_group=open_group)
            if plane == "nccl"
            else receiving(plane, link, on_arrived=on_arrived)
        ),
    )
    return opened


@pytest.mark.parametrize("num_blocks", [1, 7, 8, 9, 100])
async def test_blocks_arrive_byte_for_byte_and_one_thread_per_device_did_it(num_blocks, pairs):
    async with DevicePair(layout=TALL) as pair, asyncio.timeout(20):
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
        assert torch.equal(pair.sent_blocks(lease), pair.received_blocks(incoming))
        pair.send_pool.release(lease)
        pair.receive_pool.release(incoming.lease)
        await all_available(pair.send_pool)
        await all_available(pair.receive_pool)
        assert lane._plane_name == "nccl"
    assert [len(opened.threads) for opened in pairs] == [1, 1]
    for memory in (pair.send_memory, pair.receive_memory):
        memory.thread.shutdown()
    assert [opened.num_aborts for opened in pairs] == [1, 1]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17])
async def test_what_is_behind_the_last_token_never_leaves_the_sender(num_tokens, pairs):
    num_blocks = LAYOUT.blocks_for(num_tokens)
    async with DevicePair() as pair, asyncio.timeout(20):
        incoming, received = pair.expect(num_blocks, num_tokens=num_tokens)
        lane, lease, outgoing, _ = await pair.send(
            incoming.transfer_id, num_blocks, num_tokens=num_tokens
        )
        # Random everywhere, as another request would have left it.
        pair.compute(lease, 0, num_blocks)
        lane.offer(outgoing, first_block=0, num_blocks=num_blocks)
        lane.commit(outgoing, num_blocks=num_blocks, first_tokens=FIRST)
        assert await received is None
        last = num_tokens - (num_blocks - 1) * LAYOUT.block_size
        ours, theirs = pair.received_blocks(incoming)[-1], pair.sent_blocks(lease)[-1]
        assert torch.equal(ours[:, :, :, :last], theirs[:, :, :, :last])
        assert not ours[:, :, :, last:].any()


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_an_abort_in_the_middle_frees_both_sides_and_the_lane_goes_on(side, pairs):
    async with DevicePair(layout=TALL) as pair, asyncio.timeout(20):
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
        pair.lanes.abort(incoming, "cancelled")
        assert await received == "cancelled"
        pair.send_pool.release(lease)
        pair.receive_pool.release(incoming.lease)
        await all_available(pair.send_pool)
        await all_available(pair.receive_pool)
        assert await pair.dialer.lane_to(D) is lane


async def test_a_lost_receiver_ends_transfers_and_the_next_lane_has_a_new_communicator(pairs):
    async with DevicePair() as pair, asyncio.timeout(20):
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
        assert len(pairs) == 4
        pair.send_pool.release(lease)
        await all_available(pair.send_pool)


async def test_nodes_whose_blocks_differ_meet_in_grpc(pairs):
    other = replace(LAYOUT, block_size=4)
    async with (
        DevicePair(receive_layout=other, planes=("nccl", "grpc")) as pair,
        asyncio.timeout(20),
    ):
        incoming, received = pair.expect(4, num_tokens=16)
        lane, lease, outgoing, _ = await pair.send(incoming.transfer_id, 1)
        pair.compute(lease, 0, 1)
        lane.offer(outgoing, first_block=0, num_blocks=1)
        lane.commit(outgoing, num_blocks=1, first_tokens=FIRST)
        assert await received is None
        assert lane._plane_name == "grpc"
        assert not pairs


async def test_a_pair_that_nccl_does_not_connect_takes_the_next_plane(pairs, monkeypatch):
    def duplicate_gpu(*_: object) -> None:
        raise RuntimeError("NCCL error: invalid usage\nDuplicate GPU detected")

    monkeypatch.setattr("nccl_stand_in.GlooPair.__init__", duplicate_gpu)
    async with DevicePair(planes=("nccl", "grpc")) as pair, asyncio.timeout(20):
        with pytest.raises(ServingError, match="nccl cannot connect: NCCL error: invalid usage"):
            await pair.dialer.lane_to(D)
        assert (await pair.dialer.lane_to(D))._plane_name == "grpc"
    async with DevicePair(planes=("nccl",)) as pair, asyncio.timeout(20):
        for _ in range(2):
            with pytest.raises(ServingError, match="nccl cannot connect"):
                await pair.dialer.lane_to(D)


async def test_a_communicator_that_breaks_ends_the_lane_with_its_reason(pairs, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("NCCL error: unhandled cuda error\nmore about it")

    async with DevicePair() as pair, asyncio.timeout(20):
        incoming, received = pair.expect(1)
        lane, lease, outgoing, sent = await pair.send(incoming.transfer_id, 1)
        monkeypatch.setattr(pairs[0], "send", broken)
        monkeypatch.setattr(pairs[1], "send", broken)
        pair.compute(lease, 0, 1)
        lane.offer(outgoing, first_block=0, num_blocks=1)
        assert await sent == "lane lost: nccl send: NCCL error: unhandled cuda error"
        assert await received is not None
        pair.send_pool.release(lease)
        await all_available(pair.send_pool)


async def test_a_chunk_that_does_not_arrive_ends_with_the_planes_deadline(pairs, monkeypatch):
    class Never:
        def is_completed(self) -> bool:
            return False

    monkeypatch.setattr("kvtransfer.nccl_plane.PLANE_DEADLINE_S", 0.1)
    async with DevicePair() as pair, asyncio.timeout(20):
        incoming, received = pair.expect(1)
        lane, lease, outgoing, _ = await pair.send(incoming.transfer_id, 1)
        for opened in pairs:
            monkeypatch.setattr(opened, "recv", lambda *_: Never())
        pair.compute(lease, 0, 1)
        lane.offer(outgoing, first_block=0, num_blocks=1)
        assert await received == "nccl: not complete in 0.1 s"
        await lane.closed.wait()


WEDGED = """
import asyncio, threading
import torch
from kvtransfer import nccl_plane
from kvtransfer.device_memory import DeviceMemory
from kvtransfer.layout import KvLayout
from kvtransfer.plane import PlaneLink

class Wedged:
    def abort(self):
        threading.Event().wait()

async def main():
    layout = KvLayout(model="m", model_digest="d", dtype="float32", block_size=1, num_layers=1,
                      num_kv_heads=1, head_dim=1)
    memory = DeviceMemory(layout, 1, device=torch.device("cpu"))
    link = PlaneLink(address="", lane_id=b"", thread=None, memory=memory, say=None, hear=None)
    plane = nccl_plane.NcclPlaneSender(link, open_group=lambda store, rank: Wedged())
    plane._pair._open(None)
    print("closing", flush=True)
    await plane.close()
    print("closed")

nccl_plane.ABORT_BUDGET_S = 0.5
asyncio.run(main())
"""


def test_an_abort_that_hangs_ends_the_process_with_status_70():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WEDGED)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (70, "closing\n"), done.stderr
    assert "aborting an NCCL communicator took more than 0.5 s" in done.stderr


async def test_a_closed_plane_refuses_to_send(pairs):
    async with DevicePair() as pair, asyncio.timeout(20):
        lane = await pair.dialer.lane_to(D)
        await lane._plane.close()
        with pytest.raises(PlaneError, match="closed"):
            await lane._plane.send(0, torch.zeros(1, dtype=torch.uint8))
