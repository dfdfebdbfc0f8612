"""The nccl data plane: a 2-rank communicator between two GPUs. It has not run on a GPU yet; tests
run all of it on CPU tensors with another communicator.

    connect:  LaneStore: NCCL's unique id over the lane's stream; then one byte, which connects all
    send:     blocks --pack--> device staging --event--> NCCL's stream: one send, not waited for
    receive:  posted when the chunk is granted: a receive that waits holds SMs
              polled after SENT; then staging --copy--> blocks, by KvMemory.write

Where it differs from gloo: nothing touches the host, so there is no digest. A device's
communicators share one thread, which never waits for a peer: completion is an event that is
polled, because no wait for it has a deadline. What cannot wait is bounded by NCCL's non-blocking
mode (nccl_group.py). Opening a lane may hold the thread for as long as that, once. Closing aborts,
which ends the kernels of a dead peer; an abort that does not return ends the process.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import torch

from kvtransfer.device_memory import DeviceMemory
from kvtransfer.lane_store import OPEN_DEADLINE_S, LaneStore, open_over_lane
from kvtransfer.nccl_group import ABORT_BUDGET_S, Communicator, end_process_in, open_nccl
from kvtransfer.plane import PLANE_DEADLINE_S, PlaneError, PlaneLink

SENDER, RECEIVER = 0, 1
_TAG = 0
POLL_INTERVAL_S = 0.0005

OpenGroup = Callable[[LaneStore, int], Communicator]


class _Pair:
    """One end of the communicator, which is touched on the device's thread only."""

    def __init__(self, link: PlaneLink, rank: int, open_group: OpenGroup | None) -> None:
        assert isinstance(link.memory, DeviceMemory)
        self._link = link
        self._rank = rank
        self._memory = link.memory
        self._open_group = open_group or partial(open_nccl, device=link.memory.device)
        self._group: Communicator | None = None
        self._is_closed = False
        self.thread: Executor = link.memory.thread

    async def connect(self) -> None:
        try:
            await open_over_lane(
                self._link,
                self._open,
                thread=self.thread,
                # Only the sender has a key to say. Its own thread waits for none.
                hears_first=self._rank == RECEIVER,
            )
            byte = torch.zeros(1, dtype=torch.uint8, device=self._memory.device)
            begin = self.send if self._rank == SENDER else self.receive
            work = await asyncio.get_running_loop().run_in_executor(self.thread, begin, byte)
            await self.complete(work, timeout_s=OPEN_DEADLINE_S)
        except (RuntimeError, TimeoutError) as error:
            raise PlaneError(f"nccl cannot connect: {_first_line(error)}") from error

    def send(self, data: torch.Tensor) -> Any:
        """Behind what is queued on the memory's stream. On the thread."""
        with self._memory.on_stream():
            return self._opened().send([data], RECEIVER, _TAG)

    def receive(self, slot: torch.Tensor) -> Any:
        with self._memory.on_stream():
            return self._opened().recv([slot], SENDER, _TAG)

    async def complete(self, work: Any, *, timeout_s: float) -> None:
        """Returns when the device has done work. Raises PlaneError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not await loop.run_in_executor(self.thread, self._is_done, work):
            if loop.time() > deadline:
                raise PlaneError(f"nccl: not complete in {timeout_s:g} s")
            # An event can be asked or be waited for without a limit; nothing tells of it.
            await asyncio.sleep(POLL_INTERVAL_S)

    def close(self) -> "Future[None]":
        """Aborts, behind what the thread is doing."""
        self._is_closed = True
        timer = end_process_in(ABORT_BUDGET_S, "aborting an NCCL communicator")

        def abort() -> None:
            group, self._group = self._group, None
            if group is not None:
                group.abort()
            timer.cancel()

        return self.thread.submit(abort)

    def _is_done(self, work: Any) -> bool:
        if self._is_closed:
            raise PlaneError("the communicator is closed")
        try:
            if not work.is_completed():
                return False
            # Completed, so this only raises what went wrong.
            work.wait()
        except RuntimeError as error:
            raise PlaneError(f"nccl: {_first_line(error)}") from error
        return True

    def _open(self, store: LaneStore) -> None:
        if not self._is_closed:
            self._group = self._open_group(store, self._rank)

    def _opened(self) -> Communicator:
        if self._is_closed or self._group is None:
            raise PlaneError("the communicator is closed")
        return self._group


class NcclPlaneSender:
    """Sends tensors that DeviceMemory.pack has queued."""

    def __init__(self, link: PlaneLink, *, open_group: OpenGroup | None = None) -> None:
        self._pair = _Pair(link, SENDER, open_group)
        # What NCCL may still read, by seq.
        self._sending: dict[int, tuple[torch.Tensor, Any]] = {}

    async def connect(self) -> None:
        await self._pair.connect()

    async def send(self, seq: int, blocks: torch.Tensor) -> None:
        loop = asyncio.get_running_loop()
        try:
            work = await loop.run_in_executor(self._pair.thread, self._pair.send, blocks)
        except RuntimeError as error:
            raise PlaneError(f"nccl send: {_first_line(error)}") from error
        self._sending[seq] = (blocks, work)

    def acknowledged(self, seq: int) -> None:
        self._sending.pop(seq, None)

    async def close(self) -> None:
        await asyncio.wrap_future(self._pair.close())
        self._sending.clear()


class NcclPlaneReceiver:
    """Receives into tensors of the lane's ring."""

    def __init__(
        self,
        link: PlaneLink,
        *,
        on_arrived: Callable[[int], None],
        open_group: OpenGroup | None = None,
    ) -> None:
        self._pair = _Pair(link, RECEIVER, open_group)
        self._on_arrived = on_arrived
        # With the slot, which must live for as long as NCCL may write it.
        self._posted: dict[int, tuple[torch.Tensor, Future[Any]]] = {}

    async def connect(self) -> None:
        await self._pair.connect()

    def post_receive(self, seq: int, slot: torch.Tensor, *, num_blocks: int) -> None:
        self._posted[seq] = (slot, self._pair.thread.submit(self._pair.receive, slot))

    def sent(self, seq: int) -> None:
        self._on_arrived(seq)

    async def wait(self, seq: int, slot: torch.Tensor) -> None:
        try:
            work = await asyncio.wrap_future(self._posted[seq][1])
        except RuntimeError as error:
            raise PlaneError(f"nccl receive: {_first_line(error)}") from error
        await self._pair.complete(work, timeout_s=PLANE_DEADLINE_S)
        self._posted.pop(seq, None)

    def close(self) -> None:
        self._pair.close()
        self._pair.thread.submit(self._posted.clear)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
