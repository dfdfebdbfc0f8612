"""A lane as the decode node holds it: the receiver's state machine, its staging ring, its stream.

    Lane call --messages--> LaneReceiver --Post--> plane fills a slot
                                         --Copy--> lane thread: slot -> blocks, under a write
                                         --Say---> outbox -> Lane call

State on the event loop; the staging copy on the lane thread.
"""

import asyncio
from concurrent.futures import Executor

from kvtransfer.blocks import BlockPool, LeaseReleased
from kvtransfer.grpc_plane import GrpcPlaneReceiver
from kvtransfer.inbox import Inbox, IncomingTransfer
from kvtransfer.memory import KvMemory
from kvtransfer.messages import NodeKey, ReceiverMessage, SenderMessage
from kvtransfer.receiver import Action, Copy, LaneProtocolError, LaneReceiver, Post, Say

WATCH_INTERVAL_S = 0.5


class IncomingLane:
    """One lane from one prefill node. failure is the reason why it cannot go on; the outbox then
    ends with None."""

    def __init__(
        self,
        *,
        sender: NodeKey,
        lane_id: bytes,
        epoch: int,
        inbox: Inbox,
        pool: BlockPool,
        memory: KvMemory,
        num_slots: int,
        slot_bytes: int,
        copier: Executor,
    ) -> None:
        self.sender = sender
        self.lane_id = lane_id
        self.epoch = epoch
        self.failure: str | None = None
        self._is_closed = False
        self.outbox: asyncio.Queue[ReceiverMessage | None] = asyncio.Queue()
        self.plane = GrpcPlaneReceiver(on_arrived=self._on_arrived)
        self._pool = pool
        self._memory = memory
        self._copier = copier
        self._copies: set[asyncio.Task[None]] = set()
        self._slots = [memoryview(bytearray(slot_bytes)) for _ in range(num_slots)]
        self._receiver = LaneReceiver(
            inbox=inbox,
            sender=sender,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            block_bytes=memory.layout.block_bytes,
        )

    def handle(self, message: SenderMessage) -> None:
        """Takes in one message of the sender. Raises LaneProtocolError."""
        self._act(self._receiver.handle(message, now=_now()))

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
            self._receiver.close(reason)

    async def watch(self) -> None:
        """Ends the lane when a granted chunk misses its deadline."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._receiver.overdue(_now()):
                raise LaneProtocolError("a granted chunk did not arrive in time")

    def _on_arrived(self, seq: int, digest: int) -> None:
        self._act(self._receiver.bytes_arrived(seq, digest, now=_now()))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Say():
                    self.outbox.put_nowait(action.message)
                case Post():
                    slot = self._slots[action.slot][: action.size_bytes]
                    self.plane.post_receive(action.seq, slot)
                case Copy():
                    task = asyncio.create_task(self._copy(action))
                    self._copies.add(task)
                    task.add_done_callback(self._copies.discard)

    async def _copy(self, action: Copy) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._copier, self._copy_blocks, action)
        if self.failure is None:
            self._act(self._receiver.copied(action.seq, now=_now()))

    def _copy_blocks(self, action: Copy) -> None:
        lease = action.transfer.lease
        block_ids = lease.block_ids[action.first_block : action.first_block + action.num_blocks]
        writer = f"lane {self.sender} epoch {self.epoch}"
        try:
            self._pool.begin_write(lease, block_ids, writer=writer)
        except LeaseReleased:
            return
        size_bytes = action.num_blocks * self._memory.layout.block_bytes
        self._memory.write(block_ids, self._slots[action.slot][:size_bytes])
        self._pool.end_write(block_ids, writer=writer)


def _now() -> float:
    return asyncio.get_running_loop().time()
