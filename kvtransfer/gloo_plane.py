"""The gloo data plane: a 2-rank process group over loopback TCP, for CPU nodes of one host.

    connect:  LaneStore: each end's address over the lane's stream
    send:     one send per block, straight from the pool; its ACK says that it is complete
    receive:  one posted receive per block, straight into the slot; waited for after SENT only

What gloo does, and how it shows here: a receive never tells that it is complete but by wait(), so
there is no polling; a wait that times out closes the pair for good, which is how a lane is torn
down; a peer that was killed fails all waits at once, a frozen one only the deadline. All
operations have one tag and go in seq order, as NCCL would order them.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvtransfer.chunk_bytes import digest
from kvtransfer.lane_store import OPEN_DEADLINE_S, LaneStore, open_over_lane
from kvtransfer.plane import PLANE_DEADLINE_S, PlaneError, PlaneLink

INTERFACE = "127.0.0.1"
SENDER, RECEIVER = 0, 1
_TAG = 0


class _Group:
    """One end of the process group. open, send and wait on the lane's thread."""

    def __init__(self, link: PlaneLink, rank: int) -> None:
        self._link = link
        self._rank = rank
        self._group: Any = None

    async def connect(self) -> None:
        try:
            await open_over_lane(self._link, self._open, thread=self._link.thread)
        except (RuntimeError, TimeoutError) as error:
            raise PlaneError(f"gloo cannot connect: {_first_line(error)}") from error

    def send(self, blocks: Sequence[memoryview]) -> list[Any]:
        group = self._open_group()
        try:
            return [group.send([_tensor(block)], RECEIVER, _TAG) for block in blocks]
        except RuntimeError as error:
            raise PlaneError(f"gloo send: {_first_line(error)}") from error

    def receive(self, parts: Sequence[memoryview]) -> list[Any]:
        group = self._open_group()
        try:
            return [group.recv([_tensor(part)], SENDER, _TAG) for part in parts]
        except RuntimeError as error:
            raise PlaneError(f"gloo receive: {_first_line(error)}") from error

    def close(self) -> None:
        """Closes the connection once nobody waits on it; wakes the other end."""
        self._group = None

    def _open_group(self) -> Any:
        if self._group is None:
            raise PlaneError("the process group is closed")
        return self._group

    def _open(self, store: LaneStore) -> None:
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()  # type: ignore[attr-defined]
        options._devices = [gloo.create_device(hostname=INTERFACE)]
        options._timeout = timedelta(seconds=OPEN_DEADLINE_S)
        options._threads = 1
        self._group = gloo(store, self._rank, 2, options)


class GlooPlaneSender:
    def __init__(self, link: PlaneLink) -> None:
        self._thread = link.thread
        self._group = _Group(link, SENDER)
        # What gloo may still read, by seq.
        self._sending: dict[int, tuple[Sequence[memoryview], list[Any]]] = {}

    async def connect(self) -> None:
        await self._group.connect()

    async def send(self, seq: int, blocks: Sequence[memoryview]) -> None:
        # On the thread, because gloo writes at once what the socket takes. Not waited for.
        loop = asyncio.get_running_loop()
        works = await loop.run_in_executor(self._thread, self._group.send, blocks)
        self._sending[seq] = (blocks, works)

    def acknowledged(self, seq: int) -> None:
        self._sending.pop(seq, None)

    async def close(self) -> None:
        # The group before the sends that it may still read for.
        self._group.close()
        self._sending.clear()


class GlooPlaneReceiver:
    """Receives are posted from the loop, which does not block, and waited for on the thread."""

    def __init__(self, link: PlaneLink, *, on_arrived: Callable[[int], None]) -> None:
        self._thread = link.thread
        self._group = _Group(link, RECEIVER)
        self._on_arrived = on_arrived
        self._posted: dict[int, list[Any]] = {}

    async def connect(self) -> None:
        await self._group.connect()

    def post_receive(self, seq: int, slot: memoryview, *, num_blocks: int) -> None:
        size = len(slot) // num_blocks
        parts = [slot[start : start + size] for start in range(0, len(slot), size)]
        self._posted[seq] = self._group.receive(parts)

    def sent(self, seq: int) -> None:
        self._on_arrived(seq)

    async def wait(self, seq: int, slot: memoryview) -> int:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._wait_and_digest, seq, slot)

    def close(self) -> None:
        # The group before the receives that it may still fill.
        self._thread.submit(self._group.close)
        self._thread.submit(self._posted.clear)

    def _wait_and_digest(self, seq: int, slot: memoryview) -> int:
        try:
            wait_all(self._posted.pop(seq))
        except RuntimeError as error:
            raise PlaneError(f"gloo receive: {_first_line(error)}") from error
        return digest([slot])


def wait_all(works: Sequence[Any]) -> None:
    """Raises RuntimeError, after which the pair is closed."""
    for work in works:
        work.wait(timedelta(seconds=PLANE_DEADLINE_S))


def _tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    # Behind "[file:line] " of a source tree that nobody here has.
    return str(error).partition("] ")[2].splitlines()[0] if "] " in str(error) else str(error)
