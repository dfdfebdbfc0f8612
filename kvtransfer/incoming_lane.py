"""A lane as the decode node holds it: the receiver's state machine, its staging ring, its stream.

    Lane call --messages--> LaneReceiver --Post--> plane fills a slot --plane thread: digest-+
                                         --Copy--> copy thread: slot -> blocks, under a write
                                         --Say---> outbox -> Lane call

State on the event loop. A lane has two threads of its own, so that a frozen peer holds up no other
lane, and the next chunk can be waited for while one is copied: its plane's waits for bytes and
computes digests, its own copies.
"""

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvtransfer.blocks import BlockPool, LeaseReleased
from kvtransfer.chunk_bytes import touched_blocks, write_chunk
from kvtransfer.inbox import Inbox, IncomingTransfer
from kvtransfer.lane_metrics import LaneMetrics
from kvtransfer.layout import KvLayout
from kvtransfer.memory import KvMemory
from kvtransfer.messages import NodeKey, SenderMessage, Sent
from kvtransfer.plane import PlaneError, PlaneLink, ReceivingPlane
from kvtransfer.planes import receiving_plane, staging_slots
from kvtransfer.receiver import Action, Copy, LaneProtocolError, LaneReceiver, Post, Say
from kvtransfer.wire import receiver_message_to_pb
from protos.pd.v1 import lane_pb2

WATCH_INTERVAL_S = 0.5
CONNECT_DEADLINE_S = 5.0
# Bytes that were lost or came twice shift all that follow on a plane without seqs: begin anew.
MAX_BAD_IN_ROW = 3
# That wait to be taken in by the plane.
MAX_RENDEZVOUS = 4


class IncomingLane:
    """One lane from one prefill node, whose blocks have the layout theirs.

    failure is the reason why it cannot go on; the outbox then ends with None.
    """

    def __init__(
        self,
        *,
        sender: NodeKey,
        theirs: KvLayout,
        lane_id: bytes,
        epoch: int,
        plane_name: str,
        inbox: Inbox,
        pool: BlockPool,
        memory: KvMemory,
        num_slots: int,
        slot_bytes: int,
        metrics: LaneMetrics,
    ) -> None:
        self.sender = sender
        self.lane_id = lane_id
        self.epoch = epoch
        self.plane_name = plane_name
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.failure: str | None = None
        self.outbox: asyncio.Queue[lane_pb2.LaneResponse | None] = asyncio.Queue()
        self._is_connected = self._is_closed = False
        self._theirs = theirs
        self._pool = pool
        self._memory = memory
        self._plane_thread = ThreadPoolExecutor(1, thread_name_prefix="plane")
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="lane")
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = staging_slots(plane_name, memory, num_slots, slot_bytes=slot_bytes)
        # Slots of chunks that are posted and not yet checked, by seq.
        self._posted: dict[int, Any] = {}
        self._metrics = metrics
        self._num_bad_in_row = 0
        # When each granted chunk was granted, by seq.
        self._granted_at: dict[int, float] = {}
        self._rendezvous: asyncio.Queue[lane_pb2.Rendezvous] = asyncio.Queue(MAX_RENDEZVOUS)
        link = PlaneLink(
            address="",
            lane_id=lane_id,
            thread=self._plane_thread,
            memory=memory,
            say=lambda message: self._say(lane_pb2.LaneResponse(rendezvous=message)),
            hear=self._rendezvous.get,
        )
        self.plane: ReceivingPlane = receiving_plane(plane_name, link, on_arrived=self._on_arrived)
        self._receiver = LaneReceiver(
            inbox=inbox,
            sender=sender,
            layout=theirs,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
        )

    async def connect(self) -> None:
        """Brings the plane up. Raises PlaneError."""
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                await self.plane.connect()
        except TimeoutError as error:
            raise PlaneError(f"{self.plane_name}: not connected in time") from error
        self._is_connected = True

    def rendezvous(self, message: lane_pb2.Rendezvous) -> None:
        """Takes in one of the other end's. Raises LaneProtocolError if none is due."""
        if self._is_connected:
            raise LaneProtocolError("a rendezvous on a lane that is connected")
        try:
            self._rendezvous.put_nowait(message)
        except asyncio.QueueFull as error:
            raise LaneProtocolError("too many rendezvous messages") from error

    def handle(self, message: SenderMessage) -> None:
        """Takes in one message of the sender. Raises LaneProtocolError."""
        self._act(self._receiver.handle(message, now=_now()))
        if isinstance(message, Sent):
            self.plane.sent(message.seq)

    def abort(self, transfer: IncomingTransfer, reason: str) -> None:
        self._act(self._receiver.abort(transfer, reason))

    def fail(self, reason: str) -> None:
        """Makes the Lane call end."""
        if self.failure is None:
            self.failure = reason
            self.outbox.put_nowait(None)

    def close(self, reason: str) -> None:
        """Ends every transfer of this lane, once: a later lane of the same sender may have begun
        others. A copy under way finishes under its own write."""
        self.fail(reason)
        if not self._is_closed:
            self._is_closed = True
            self.plane.close()
            self._plane_thread.shutdown(wait=False)
            self._copy_thread.shutdown(wait=False)
            self._receiver.close(reason)

    async def watch(self) -> None:
        """Ends the lane when a granted chunk misses its deadline."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._receiver.overdue(_now()):
                raise LaneProtocolError("a granted chunk did not arrive in time")

    def _say(self, response: lane_pb2.LaneResponse) -> None:
        self.outbox.put_nowait(response)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Say():
                    self._say(receiver_message_to_pb(action.message))
                case Post():
                    slot = self._slots[action.slot][: action.size_bytes]
                    self._posted[action.seq] = slot
                    self._granted_at[action.seq] = time.monotonic()
                    num_blocks = action.size_bytes // self._theirs.block_bytes
                    self.plane.post_receive(action.seq, slot, num_blocks=num_blocks)
                case Copy():
                    self._start(self._copy(action))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_arrived(self, seq: int) -> None:
        if seq in self._posted:
            self._start(self._check(seq, self._posted.pop(seq)))

    async def _check(self, seq: int, slot: Any) -> None:
        if self._is_closed:
            return
        try:
            checksum = await self.plane.wait(seq, slot)
        except PlaneError as error:
            self.fail(str(error))
            return
        if self.failure is None:
            stale, bad = self._receiver.num_dropped_chunks, self._receiver.num_bad_chunks
            self._act(self._receiver.bytes_arrived(seq, checksum, now=_now()))
            if self._receiver.num_dropped_chunks > stale:
                self._metrics.stale_chunk()
            if self._receiver.num_bad_chunks == bad:
                self._num_bad_in_row = 0
            else:
                self._metrics.bad_chunk()
                self._num_bad_in_row += 1
                if self._num_bad_in_row >= MAX_BAD_IN_ROW:
                    self.fail("the data plane is out of step with the lane")

    async def _copy(self, action: Copy) -> None:
        if self._is_closed:
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._copy_thread, self._copy_blocks, action)
        if self.failure is None:
            self._metrics.chunk_received(
                plane=self.plane_name,
                size_bytes=action.num_blocks * self._theirs.block_bytes,
                seconds=time.monotonic() - self._granted_at.pop(action.seq),
            )
            self._act(self._receiver.copied(action.seq, now=_now()))

    def _copy_blocks(self, action: Copy) -> None:
        transfer, chunk = action.transfer, action
        lease = transfer.lease
        touched = touched_blocks(
            self._memory.layout,
            theirs=self._theirs,
            first_block=chunk.first_block,
            num_blocks=chunk.num_blocks,
            num_tokens=transfer.num_tokens,
            num_cached_tokens=transfer.num_cached_tokens,
        )
        block_ids = [lease.block_ids[index] for index in touched]
        writer = f"lane {self.sender} epoch {self.epoch}"
        try:
            self._pool.begin_write(lease, block_ids, writer=writer)
        except LeaseReleased:
            return
        size_bytes = chunk.num_blocks * self._theirs.block_bytes
        try:
            write_chunk(
                self._memory,
                lease.block_ids,
                self._slots[chunk.slot][:size_bytes],
                theirs=self._theirs,
                first_block=chunk.first_block,
                num_blocks=chunk.num_blocks,
                num_tokens=transfer.num_tokens,
                num_cached_tokens=transfer.num_cached_tokens,
            )
        finally:
            self._pool.end_write(block_ids, writer=writer)


def _now() -> float:
    return asyncio.get_running_loop().time()
