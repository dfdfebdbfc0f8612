"""Faults of the data plane, over real sockets: what arrives is right, or its transfer ends."""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace

import pytest
from test_lane import FIRST, LAYOUT, D, Pair, all_available

from kvtransfer import outgoing_lane
from kvtransfer.messages import NodeKey
from tests.faulty_plane import FAULTS, faulty

# A third of 4 MiB: three blocks to a chunk, so that few blocks are many chunks.
LAYOUT_3 = replace(LAYOUT, num_layers=80)


async def transfer(pair: Pair, *, num_blocks: int) -> str | None:
    """Blocks of random bytes from end to end; why it failed, or None when all bytes are equal."""
    incoming, received = pair.expect(num_blocks)
    try:
        lane, lease, outgoing, sent = await pair.send(incoming.transfer_id, num_blocks)
        pair.compute(lease, 0, num_blocks)
        lane.offer(outgoing, first_block=0, num_blocks=num_blocks)
        lane.commit(outgoing, num_blocks=num_blocks, first_tokens=FIRST)
        reason = await sent
        if reason is None:
            assert await received is None
            for ours, theirs in zip(lease.block_ids, incoming.lease.block_ids, strict=True):
                assert pair.send_memory.block(ours) == pair.receive_memory.block(theirs)
        pair.send_pool.release(lease)
        return reason
    finally:
        pair.lanes.abort(incoming, "over")
        pair.receive_pool.release(incoming.lease)


@pytest.mark.parametrize("plane", ["grpc", "gloo"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "die"])
async def test_a_fault_ends_its_transfer_or_does_no_harm(fault, plane, monkeypatch):
    monkeypatch.setattr(
        outgoing_lane, "sending_plane", faulty(outgoing_lane.sending_plane, fault, at=1)
    )
    async with (
        Pair(layout=LAYOUT_3, receive_layout=LAYOUT_3, plane=plane) as pair,
        asyncio.timeout(20),
    ):
        reason = await transfer(pair, num_blocks=12)
        if fault in ("delay", "corrupt"):
            assert reason is None
        await all_available(pair.send_pool)
        await all_available(pair.receive_pool)
        # Whatever it was, the next transfers are sound, on this lane or on a new one.
        for _ in range(2):
            reason = await transfer(pair, num_blocks=12)
        assert reason is None
        await all_available(pair.send_pool)
        await all_available(pair.receive_pool)


@pytest.mark.parametrize("plane", ["grpc", "gloo"])
async def test_a_paused_sender_writes_nothing_into_blocks_that_were_given_to_another(plane):
    async with (
        Pair(layout=LAYOUT_3, receive_layout=LAYOUT_3, plane=plane) as pair,
        asyncio.timeout(20),
    ):
        incoming, received = pair.expect(12)
        lane, lease, outgoing, sent = await pair.send(incoming.transfer_id, 12)
        pair.compute(lease, 0, 12)
        lane.offer(outgoing, first_block=0, num_blocks=12)
        while len(incoming.received) < 3:
            await asyncio.sleep(0)
        # Cancelled with chunks in flight: the same blocks belong to somebody else at once.
        pair.lanes.abort(incoming, "cancelled")
        pair.receive_pool.release(incoming.lease)
        assert await received == "cancelled"
        while pair.receive_pool.counts().available < 128:
            await asyncio.sleep(0)
        other = pair.receive_pool.reserve(128)
        pair.receive_pool.begin_write(other, other.block_ids, writer="other")
        mark = b"\xa5" * LAYOUT_3.block_bytes
        for index in other.block_ids:
            pair.receive_memory.block(index)[:] = mark
        pair.receive_pool.end_write(other.block_ids, writer="other")
        await sent
        pair.receive_pool.release(other)
        assert await transfer(pair, num_blocks=3) is None
        marked = sum(bytes(pair.receive_memory.block(i)) == mark for i in other.block_ids)
        assert marked == 128 - 3


RECEIVER = """
import asyncio, sys
import torch  # which a CPU node has long loaded when its first lane opens
from bench.transfer import receive
from kvtransfer.layout import KvLayout
from kvtransfer.messages import NodeKey
asyncio.run(receive(eval(sys.argv[2]), planes=[sys.argv[1]], me=eval(sys.argv[3])))
"""


async def start_receiver(plane: str, me: NodeKey) -> asyncio.subprocess.Process:
    """A decode node's end of a lane, in a process of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RECEIVER, plane, repr(LAYOUT_3), repr(me)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def expect(child: asyncio.subprocess.Process, num_blocks: int) -> bytes:
    child.stdin.write(f"{num_blocks}\n".encode())
    return bytes.fromhex((await child.stdout.readline()).decode())


@pytest.mark.parametrize(
    ("plane", "signum"),
    [
        ("grpc", signal.SIGKILL),
        ("gloo", signal.SIGKILL),
        ("gloo", signal.SIGSTOP),
        pytest.param("grpc", signal.SIGSTOP, marks=pytest.mark.faults),
    ],
)
async def test_a_peer_that_stops_ends_the_transfer_and_frees_the_blocks(plane, signum):
    """A lane by itself, without heartbeats: the deadline of a granted chunk is all it has."""
    child = await start_receiver(plane, D)
    limit_s = 1.0 if signum == signal.SIGKILL else 6.0
    try:
        async with Pair(layout=LAYOUT_3, receive_layout=LAYOUT_3, plane=plane) as pair:
            pair.address = (await child.stdout.readline()).decode().split()[0]
            transfer_id = await expect(child, 100)
            lane, lease, outgoing, sent = await pair.send(transfer_id, 100)
            pair.compute(lease, 0, 100)
            os.kill(child.pid, signum)
            lane.offer(outgoing, first_block=0, num_blocks=100)
            async with asyncio.timeout(limit_s):
                assert await sent is not None
                pair.send_pool.release(lease)
                await all_available(pair.send_pool)
            await lane.closed.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


@pytest.mark.parametrize("plane", ["grpc", "gloo"])
async def test_a_frozen_peer_does_not_hold_up_another_lane_of_the_same_node(plane):
    """Five transfers to one peer end while one to a frozen peer is still under way."""
    frozen_key = replace(D, node_id="decode-1")
    child = await start_receiver(plane, frozen_key)
    both = {"layout": LAYOUT_3, "receive_layout": LAYOUT_3}
    try:
        async with Pair(**both, plane=plane) as pair, asyncio.timeout(20):
            pair.others[frozen_key] = (await child.stdout.readline()).decode().split()[0]
            transfer_id = await expect(child, 60)
            lane = await pair.dialer.lane_to(frozen_key)
            lease = pair.send_pool.reserve(60)
            pair.compute(lease, 0, 60)
            ended = asyncio.get_running_loop().create_future()
            outgoing = lane.begin(
                transfer_id, lease=lease, num_tokens=60 * 16, on_end=ended.set_result
            )
            child.send_signal(signal.SIGSTOP)
            lane.offer(outgoing, first_block=0, num_blocks=60)
            for _ in range(5):
                assert await transfer(pair, num_blocks=12) is None
            assert not ended.done()
            assert await ended is not None
            pair.send_pool.release(lease)
            await all_available(pair.send_pool)
    finally:
        child.kill()
        await child.wait()
