"""The receiving end of a lane, as a pure state machine: messages in, actions out.

    READY --(slot free)--> GRANT, slot posted --(SENT and bytes)--> copy to blocks --> ACK

A chunk lands in a slot of a bounded staging ring; only after its transfer, range and digest were
checked is it copied into blocks, under a write of the transfer's lease. Every event has an outcome:

    READY   transfer unknown, over or another's   ABORT "unknown transfer"; no slot
            cached blocks, past the end, or twice ABORT
            wrong seq or size                     LaneProtocolError
    SENT    never granted, or twice               LaneProtocolError
    chunk   its transfer is over                  ACK, dropped: no block is touched
            digest differs                        NACK: the same blocks are due again, as a new seq
            differs again for one of the blocks   ACK, then ABORT
    COMMIT  chunks in flight or due again         waits for them, then COMMITTED
            chunks never announced, wrong count   ABORT
            a second one, while one waits         ABORT
            transfer unknown or over              nothing
    ABORT   transfer open                         ABORT; of its chunks, those without a GRANT are
                                                  skipped, granted ones complete and are dropped
            transfer unknown or over              nothing

LaneProtocolError ends the lane. Blocks are counted in the sender's size. Runs on the event loop;
time is passed in.
"""

from collections import deque
from dataclasses import dataclass

from kvtransfer.inbox import Inbox, IncomingTransfer
from kvtransfer.layout import KvLayout
from kvtransfer.messages import (
    Abort,
    Ack,
    Commit,
    Committed,
    Grant,
    Nack,
    NodeKey,
    Ready,
    ReceiverMessage,
    SenderMessage,
    Sent,
)


class LaneProtocolError(Exception):
    """The peer said what it must not say; the lane cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Send this message on the lane's stream."""

    message: ReceiverMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Receive chunk seq from the data plane into slot, then report bytes_arrived."""

    seq: int
    slot: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copy slot, the sender's blocks [first_block, first_block + num_blocks), into the transfer's
    lease, then report copied."""

    seq: int
    slot: int
    transfer: IncomingTransfer
    first_block: int
    num_blocks: int


Action = Say | Post | Copy


@dataclass(slots=True)
class _Chunk:
    """A granted chunk: deadline is when bytes and SENT must be here."""

    ready: Ready
    transfer: IncomingTransfer
    slot: int
    deadline: float
    sent: Sent | None = None
    has_arrived: bool = False
    # Of the bytes that arrived; 0 if they are not checked.
    digest: int = 0

    @property
    def blocks(self) -> set[int]:
        return _blocks(self.ready)


class LaneReceiver:
    """State of one lane. sender is who is at the other end, layout that of its blocks.

    num_dropped_chunks came too late for their transfer, num_bad_chunks had another digest.
    """

    def __init__(
        self,
        *,
        inbox: Inbox,
        sender: NodeKey,
        layout: KvLayout,
        num_slots: int,
        slot_bytes: int,
        chunk_deadline_s: float = 3.5,
    ) -> None:
        self._inbox = inbox
        self._sender = sender
        self._layout = layout
        self._slot_bytes = slot_bytes
        self._chunk_deadline_s = chunk_deadline_s
        self._free_slots = list(range(num_slots))
        self._next_seq = 0
        self._waiting: deque[tuple[Ready, IncomingTransfer]] = deque()
        self._granted: dict[int, _Chunk] = {}
        self._copying: dict[int, _Chunk] = {}
        self._commits: dict[bytes, Commit] = {}
        self.num_dropped_chunks = 0
        self.num_bad_chunks = 0

    @property
    def num_busy_slots(self) -> int:
        return len(self._granted) + len(self._copying)

    def handle(self, message: SenderMessage, *, now: float) -> list[Action]:
        """Takes in one message of the sender. Raises LaneProtocolError."""
        match message:
            case Ready():
                return self._on_ready(message, now)
            case Sent():
                return self._on_sent(message, now)
            case Commit():
                return self._on_commit(message)
            case Abort():
                transfer = self._inbox.find(message.transfer_id, sender=self._sender)
                if transfer is None:
                    return []
                return self.abort(transfer, message.reason)

    def bytes_arrived(self, seq: int, digest: int | None, *, now: float) -> list[Action]:
        """The data plane has put all of chunk seq, whose digest is digest, into its slot.

        No digest: it was not computed, and SENT must say the same.
        """
        chunk = self._granted[seq]
        chunk.has_arrived, chunk.digest = True, digest or 0
        return self._complete(seq, now)

    def copied(self, seq: int, *, now: float) -> list[Action]:
        """The chunk is in its blocks (or its lease was released meanwhile)."""
        chunk = self._copying.pop(seq)
        self._free_slots.append(chunk.slot)
        transfer = chunk.transfer
        transfer.in_flight -= chunk.blocks
        transfer.received |= chunk.blocks
        return [Say(message=Ack(seq=seq)), *self._try_seal(transfer), *self._grant(now)]

    def abort(self, transfer: IncomingTransfer, reason: str) -> list[Action]:
        """Ends an open transfer of this lane and tells the sender. Nothing if it is over."""
        if transfer.ended:
            return []
        self._commits.pop(transfer.transfer_id, None)
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not transfer)
        self._inbox.end(transfer, reason)
        return [Say(message=Abort(transfer_id=transfer.transfer_id, reason=reason))]

    def close(self, reason: str) -> None:
        """The lane is gone: every open transfer of this sender ends."""
        for transfer in self._inbox.from_sender(self._sender):
            self._inbox.end(transfer, reason)

    def overdue(self, now: float) -> bool:
        """A granted chunk has missed its deadline."""
        return any(chunk.deadline < now for chunk in self._granted.values())

    def _on_ready(self, ready: Ready, now: float) -> list[Action]:
        if ready.seq != self._next_seq:
            raise LaneProtocolError(f"READY seq {ready.seq}, expected {self._next_seq}")
        self._next_seq += 1
        if ready.num_blocks < 1 or ready.size_bytes != ready.num_blocks * self._layout.block_bytes:
            raise LaneProtocolError(f"{ready.size_bytes} bytes for {ready.num_blocks} blocks")
        if ready.size_bytes > self._slot_bytes:
            raise LaneProtocolError(f"{ready.size_bytes} bytes for slots of {self._slot_bytes}")
        transfer = self._inbox.find(ready.transfer_id, sender=self._sender)
        if transfer is None:
            return [Say(message=Abort(transfer_id=ready.transfer_id, reason="unknown transfer"))]
        blocks = _blocks(ready)
        due = self._due(transfer)
        if ready.first_block < due.start:
            return self.abort(transfer, "chunk of a prefix that is here")
        if max(blocks) >= due.stop:
            return self.abort(transfer, "chunk past the transfer's end")
        if blocks & (transfer.received | transfer.in_flight):
            return self.abort(transfer, "chunk sent twice")
        transfer.in_flight |= blocks
        self._waiting.append((ready, transfer))
        return self._grant(now)

    def _grant(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while self._waiting and self._free_slots:
            ready, transfer = self._waiting.popleft()
            slot = self._free_slots.pop()
            self._granted[ready.seq] = _Chunk(ready, transfer, slot, now + self._chunk_deadline_s)
            actions.append(Post(seq=ready.seq, slot=slot, size_bytes=ready.size_bytes))
            actions.append(Say(message=Grant(seq=ready.seq)))
        return actions

    def _on_sent(self, sent: Sent, now: float) -> list[Action]:
        chunk = self._granted.get(sent.seq)
        if chunk is None or chunk.sent is not None:
            raise LaneProtocolError(f"SENT seq {sent.seq}, which was not granted")
        chunk.sent = sent
        return self._complete(sent.seq, now)

    def _complete(self, seq: int, now: float) -> list[Action]:
        chunk = self._granted[seq]
        if chunk.sent is None or not chunk.has_arrived:
            return []
        del self._granted[seq]
        if chunk.transfer.ended:
            self.num_dropped_chunks += 1
            self._free_slots.append(chunk.slot)
            return [Say(message=Ack(seq=seq)), *self._grant(now)]
        if chunk.sent.digest != chunk.digest:
            self.num_bad_chunks += 1
            self._free_slots.append(chunk.slot)
            return [*self._refuse(chunk), *self._grant(now)]
        self._copying[seq] = chunk
        copy = Copy(
            seq=seq,
            slot=chunk.slot,
            transfer=chunk.transfer,
            first_block=chunk.ready.first_block,
            num_blocks=chunk.ready.num_blocks,
        )
        return [copy]

    def _refuse(self, chunk: _Chunk) -> list[Action]:
        """Wants a damaged chunk's blocks once more, or ends a transfer that was damaged twice."""
        transfer = chunk.transfer
        if chunk.blocks & transfer.damaged:
            aborted = self.abort(transfer, "chunk digest differs")
            return [Say(message=Ack(seq=chunk.ready.seq)), *aborted]
        transfer.in_flight -= chunk.blocks
        transfer.damaged |= chunk.blocks
        return [Say(message=Nack(seq=chunk.ready.seq))]

    def _on_commit(self, commit: Commit) -> list[Action]:
        transfer = self._inbox.find(commit.transfer_id, sender=self._sender)
        if transfer is None:
            return []
        if commit.transfer_id in self._commits:
            return self.abort(transfer, "committed twice")
        announced = len(transfer.received | transfer.in_flight | transfer.damaged)
        if not commit.num_blocks == announced == len(self._due(transfer)):
            return self.abort(transfer, "commit with missing chunks")
        self._commits[commit.transfer_id] = commit
        return self._try_seal(transfer)

    def _try_seal(self, transfer: IncomingTransfer) -> list[Action]:
        commit = self._commits.get(transfer.transfer_id)
        is_complete = len(transfer.received) == len(self._due(transfer))
        if transfer.ended or commit is None or not is_complete:
            return []
        del self._commits[transfer.transfer_id]
        transfer.first_tokens = commit.first_tokens
        self._inbox.end(transfer, None)
        return [Say(message=Committed(transfer_id=transfer.transfer_id))]

    def _due(self, transfer: IncomingTransfer) -> range:
        """The sender's blocks that hold tokens which are not here yet. At least one."""
        first = transfer.num_cached_tokens // self._layout.block_size
        return range(first, self._layout.blocks_for(transfer.num_tokens))


def _blocks(ready: Ready) -> set[int]:
    return set(range(ready.first_block, ready.first_block + ready.num_blocks))
