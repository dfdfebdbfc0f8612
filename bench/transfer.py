"""python -m bench.transfer: how fast KV blocks move between two processes, per data plane.

    this process: pool, dialer, lane  ==>  child process: pool, inbox, LaneServicer
                  "expect N"   --stdin-->
                               <--stdout-- transfer id, then "sealed"

Time runs from offering all blocks of a transfer to its COMMITTED, so handshakes, digests and the
copy into the receiver's blocks are in it. A raw socket copy of the same bytes between the same
processes, from the sender's pool into the receiver's, in turns with the planes, says what this
machine can do at all.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence

import uvloop

from kvtransfer.blocks import BlockPool
from kvtransfer.dialer import LaneDialer
from kvtransfer.inbox import Inbox
from kvtransfer.lane_service import LaneServicer
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory
from kvtransfer.messages import FirstToken, NodeKey
from kvtransfer.outgoing_lane import OutgoingLane
from protos.pd.v1 import lane_pb2_grpc
from protos.serving import GrpcServer

SENDER = NodeKey(node_id="prefill-0", incarnation=1)
RECEIVER = NodeKey(node_id="decode-0", incarnation=2)
PLANES = ("grpc", "gloo")
# (layers, kv heads, head dim) of 16 tokens in bf16: 368 KB and 2 MB a block.
SHAPES = {"SmolLM2-135M": (30, 3, 64), "Llama-3-8B": (32, 8, 128)}
COUNTS = (1, 8, 64, 256)
_RAW_PIECE = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--receive", choices=SHAPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        uvloop.run(receive(layout_of(args.receive)))
        return
    for shape in args.shape or SHAPES:
        uvloop.run(send(shape, rounds=args.rounds))


def layout_of(shape: str) -> KvLayout:
    num_layers, num_kv_heads, head_dim = SHAPES[shape]
    return KvLayout(
        model=shape,
        model_digest="00" * 32,
        dtype="bfloat16",
        block_size=16,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


async def receive(
    layout: KvLayout, *, planes: Sequence[str] = PLANES, me: NodeKey = RECEIVER
) -> None:
    """The child: a line with both addresses, then a line in and two lines out per transfer."""

    async def anyone(_: NodeKey) -> bool:
        return True

    pool, memory = BlockPool(max(COUNTS)), _touched_memory(layout)
    inbox, server = Inbox(), GrpcServer()
    lanes = LaneServicer(
        me=me, inbox=inbox, pool=pool, memory=memory, is_prefill_node=anyone, planes=planes
    )
    lane_pb2_grpc.add_LaneServiceServicer_to_server(lanes, server.server)
    address = await server.start("127.0.0.1:0")
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_raw_receiver, args=(raw, memory), daemon=True).start()
    print(address, raw.getsockname()[1], flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        lease = pool.reserve(int(line))

        def ended(reason: str | None, lease=lease) -> None:  # type: ignore[no-untyped-def]
            pool.release(lease)
            if reason is not None:
                print(f"transfer failed: {reason}", file=sys.stderr, flush=True)

        num_tokens = len(lease.block_ids) * layout.block_size
        transfer = inbox.expect(lease, num_tokens=num_tokens, on_end=ended)
        print(transfer.transfer_id.hex(), flush=True)
    await server.stop(grace_s=0)
    lanes.close()


class Sender:
    """The parent's end: one lane per plane to one child."""

    def __init__(self, child: asyncio.subprocess.Process, layout: KvLayout) -> None:
        self._child = child
        self._layout = layout
        self.memory = _touched_memory(layout)
        self._pool = BlockPool(max(COUNTS))

    @contextlib.asynccontextmanager
    async def lane(self, plane: str, address: str) -> AsyncIterator[OutgoingLane]:
        async def resolve(_: NodeKey) -> str:
            return address

        dialer = LaneDialer(
            me=SENDER, pool=self._pool, memory=self.memory, resolve=resolve, planes=[plane]
        )
        yield await dialer.lane_to(RECEIVER)
        await dialer.close()

    async def transfer(self, lane: OutgoingLane, num_blocks: int) -> float:
        """Seconds from offer to COMMITTED."""
        transfer_id = await self._expect(num_blocks)
        lease = self._pool.reserve(num_blocks)
        self._pool.begin_write(lease, lease.block_ids, writer="bench")
        self._pool.end_write(lease.block_ids, writer="bench")
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        outgoing = lane.begin(
            transfer_id,
            lease=lease,
            num_tokens=num_blocks * self._layout.block_size,
            on_end=ended.set_result,
        )
        lane.offer(outgoing, first_block=0, num_blocks=num_blocks)
        first = FirstToken(choice=0, position=0, token_id=0)
        lane.commit(outgoing, num_blocks=num_blocks, first_tokens=(first,))
        async with asyncio.timeout(60):
            reason = await ended
        seconds = time.perf_counter() - started
        self._pool.release(lease)
        if reason is not None:
            raise RuntimeError(f"transfer failed: {reason}")
        return seconds

    async def _expect(self, num_blocks: int) -> bytes:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{num_blocks}\n".encode())
        return bytes.fromhex((await self._child.stdout.readline()).decode().strip())


async def send(shape: str, *, rounds: int) -> None:
    layout = layout_of(shape)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.transfer",
        "--receive",
        shape,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    address, raw_port = (await child.stdout.readline()).decode().split()
    sender = Sender(child, layout)
    times: dict[tuple[str, int], list[float]] = {}
    small: dict[str, list[float]] = {plane: [] for plane in PLANES}
    try:
        # A new lane of the same sender replaces the old one, so planes take turns by rounds.
        for _ in range(rounds):
            for count in COUNTS:
                data = sender.memory.buffer[: count * layout.block_bytes]
                raw = await asyncio.to_thread(_raw_copy, int(raw_port), data)
                times.setdefault(("raw socket", count), []).append(raw)
            for plane in PLANES:
                async with sender.lane(plane, address) as lane:
                    # Every slot of the ring is touched before the clock starts.
                    await sender.transfer(lane, 64)
                    for count in COUNTS:
                        seconds = await sender.transfer(lane, count)
                        times.setdefault((plane, count), []).append(seconds)
                    large = asyncio.create_task(sender.transfer(lane, 90))
                    await asyncio.sleep(0.005)
                    small[plane].append(await sender.transfer(lane, 2))
                    await large
    finally:
        assert child.stdin is not None
        child.stdin.close()
        await child.wait()
    _print(shape, layout, times, small)


def _print(
    shape: str,
    layout: KvLayout,
    times: dict[tuple[str, int], list[float]],
    small: dict[str, list[float]],
) -> None:
    print(f"\n{shape}, blocks of {layout.block_bytes / 1e3:.0f} KB: median ms (range), GB/s")
    print("| plane | " + " | ".join(f"{count} blocks" for count in COUNTS) + " |")
    print("|--|" + "--|" * len(COUNTS))
    for plane in ("raw socket", *PLANES):
        cells = []
        for count in COUNTS:
            ms = sorted(1e3 * seconds for seconds in times[plane, count])
            median = statistics.median(ms)
            rate = count * layout.block_bytes / median / 1e6
            cells.append(f"{median:.2f} ({ms[0]:.2f} to {ms[-1]:.2f}), {rate:.2f}")
        print(f"| {plane} | " + " | ".join(cells) + " |")
    for plane in PLANES:
        ratio = statistics.median(
            raw / ours for raw, ours in zip(times["raw socket", 64], times[plane, 64], strict=True)
        )
        print(f"{plane} at 64 blocks: {ratio:.2f} x the raw socket's rate (median of rounds)")
        waited_ms = 1e3 * statistics.median(small[plane])
        print(f"{plane}: 2 blocks begun during 90: {waited_ms:.1f} ms")


def _touched_memory(layout: KvLayout) -> HostMemory:
    memory = HostMemory(layout, max(COUNTS))
    for index in range(max(COUNTS)):
        memory.block(index)[:] = os.urandom(64) * (layout.block_bytes // 64)
    return memory


def _raw_receiver(listener: socket.socket, memory: HostMemory) -> None:
    """8 bytes of length, so many bytes, one byte back; again and again."""
    while True:
        connection, _ = listener.accept()
        with connection:
            left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            start = 0
            while start < left:
                start += connection.recv_into(memory.buffer[start : min(left, start + _RAW_PIECE)])
            connection.sendall(b"!")


def _raw_copy(port: int, data: memoryview) -> float:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        started = time.perf_counter()
        connection.sendall(len(data).to_bytes(8, "little"))
        connection.sendall(data)
        connection.recv(1, socket.MSG_WAITALL)
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
