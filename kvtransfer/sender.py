"""The sending end of a lane, as a pure state machine: messages in, actions out.

    offer(blocks) --> READY --GRANT--> Ship (bytes) --> SENT --ACK---> chunk done
                        ^-------- same blocks, once -----------NACK--
    commit()      --> COMMIT after the transfer's last SENT --COMMITTED--> on_end(None)
    abort()       --> ABORT; a chunk whose grant is under way is still completed

At most num_slots chunks are announced and not acknowledged, two of them not shipped, and transfers
take turns chunk by chunk, so that a short prompt does not wait for a long one's blocks. A chunk
that arrived damaged goes before its transfer's others, and may follow its COMMIT. Runs on the
event loop.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvtransfer.blocks import Lease
from kvtransfer.messages import (
    Abort,
    Ack,
    Commit,
    Committed,
    Grant,
    Nack,
    Ready,
    ReceiverMessage,
    SenderMessage,
    Sent,
)
from kvtransfer.receiver import LaneProtocolError

# One on the wire and one that is granted meanwhile: what a chunk of another transfer waits for.
MAX_UNSHIPPED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Send this message on the lane's stream."""

    message: SenderMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Blocks [first_block, first_block + num_blocks) of a transfer."""

    transfer: "OutgoingTransfer"
    first_block: int
    num_blocks: int
    is_resend: bool = False

    @property
    def block_ids(self) -> tuple[int, ...]:
        last = self.first_block + self.num_blocks
        return self.transfer.lease.block_ids[self.first_block : last]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ship:
    """Put the chunk's bytes on the data plane, then report shipped."""

    seq: int
    chunk: Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The lane does not touch this chunk's blocks any more."""

    chunk: Chunk


Action = Say | Ship | Done


@dataclass(slots=True, kw_only=True, eq=False)
class OutgoingTransfer:
    """One prompt's blocks on their way. on_end is called once: with None when the receiver has
    sealed them, else with the reason why it will not."""

    transfer_id: bytes
    lease: Lease
    # What the transfer's blocks hold; the last one may be partly full.
    num_tokens: int
    on_end: Callable[[str | None], None]
    queued: deque[Chunk] = field(default_factory=deque)
    # Announced or granted, not SENT.
    num_unsent: int = 0
    commit: Commit | None = None
    ended: bool = False


@dataclass(slots=True)
class _Announced:
    chunk: Chunk
    granted: bool = False
    is_shipped: bool = False
    watched_since: float | None = None


class LaneSender:
    """State of one lane towards one decode node."""

    def __init__(
        self,
        *,
        num_slots: int,
        slot_bytes: int,
        block_bytes: int,
        ack_deadline_s: float = 3.5,
    ) -> None:
        if num_slots < 1 or slot_bytes < block_bytes:
            raise LaneProtocolError(
                f"{num_slots} slots of {slot_bytes} for {block_bytes}-byte blocks"
            )
        self._window = num_slots
        self._blocks_per_chunk = slot_bytes // block_bytes
        self._block_bytes = block_bytes
        self._ack_deadline_s = ack_deadline_s
        self._next_seq = 0
        self._transfers: dict[bytes, OutgoingTransfer] = {}
        self._turns: deque[OutgoingTransfer] = deque()
        self._announced: dict[int, _Announced] = {}

    def begin(
        self,
        transfer_id: bytes,
        *,
        lease: Lease,
        num_tokens: int,
        on_end: Callable[[str | None], None],
    ) -> OutgoingTransfer:
        """Opens a transfer of num_tokens tokens. Raises LaneProtocolError for an id that is open
        already."""
        if transfer_id in self._transfers:
            raise LaneProtocolError("two transfers with one id")
        transfer = OutgoingTransfer(
            transfer_id=transfer_id, lease=lease, num_tokens=num_tokens, on_end=on_end
        )
        self._transfers[transfer_id] = transfer
        return transfer

    def offer(
        self, transfer: OutgoingTransfer, *, first_block: int, num_blocks: int
    ) -> list[Action]:
        """These blocks are computed and may be sent."""
        if transfer.ended:
            return []
        end = first_block + num_blocks
        for start in range(first_block, end, self._blocks_per_chunk):
            count = min(self._blocks_per_chunk, end - start)
            transfer.queued.append(Chunk(transfer=transfer, first_block=start, num_blocks=count))
        return self._announce_with(transfer)

    def commit(self, transfer: OutgoingTransfer, commit: Commit) -> list[Action]:
        """Everything was offered; ends with on_end(None) when the receiver has sealed it."""
        if transfer.ended:
            return []
        transfer.commit = commit
        return self._try_commit(transfer)

    def abort(self, transfer: OutgoingTransfer, reason: str) -> list[Action]:
        """Ends an open transfer and tells the receiver. Nothing if it is over."""
        if transfer.ended:
            return []
        done = self._end(transfer, reason)
        return [Say(message=Abort(transfer_id=transfer.transfer_id, reason=reason)), *done]

    def close(self, reason: str) -> list[Action]:
        """The lane is gone: every open transfer ends, every chunk is done."""
        done: list[Action] = []
        for transfer in list(self._transfers.values()):
            done += self._end(transfer, reason)
        done += [Done(chunk=entry.chunk) for entry in self._announced.values()]
        self._announced.clear()
        return done

    def overdue(self, now: float) -> bool:
        """An announced chunk was not acknowledged in time. Asked from time to time: a chunk's time
        begins when it is first seen here."""
        for entry in self._announced.values():
            if entry.watched_since is None:
                entry.watched_since = now
        return any(
            now - entry.watched_since > self._ack_deadline_s
            for entry in self._announced.values()
            if entry.watched_since is not None
        )

    def handle(self, message: ReceiverMessage) -> list[Action]:
        """Takes in one message of the receiver. Raises LaneProtocolError."""
        match message:
            case Grant(seq=seq):
                entry = self._announced.get(seq)
                if entry is None or entry.granted:
                    raise LaneProtocolError(f"GRANT of seq {seq}, which was not announced")
                entry.granted = True
                return [Ship(seq=seq, chunk=entry.chunk)]
            case Ack(seq=seq):
                chunk = self._take_sent(seq, "ACK")
                return [Done(chunk=chunk), *self._announce()]
            case Nack(seq=seq):
                return self._on_nack(self._take_sent(seq, "NACK"))
            case Committed(transfer_id=transfer_id):
                transfer = self._transfers.get(transfer_id)
                if transfer is not None:
                    self._end(transfer, None)
                return []
            case Abort():
                return self._on_abort(message)

    def shipped(self, seq: int, *, digest: int | None) -> list[Action]:
        """All bytes of the chunk are on the data plane; no digest: the plane's are not checked."""
        entry = self._announced[seq]
        entry.is_shipped = True
        transfer = entry.chunk.transfer
        transfer.num_unsent -= 1
        sent = Say(message=Sent(seq=seq, digest=digest or 0))
        return [sent, *self._announce(), *self._try_commit(transfer)]

    def _take_sent(self, seq: int, answer: str) -> Chunk:
        entry = self._announced.get(seq)
        if entry is None or not entry.is_shipped:
            raise LaneProtocolError(f"{answer} of seq {seq}, which was not sent")
        del self._announced[seq]
        return entry.chunk

    def _on_nack(self, chunk: Chunk) -> list[Action]:
        transfer = chunk.transfer
        if transfer.ended:
            return [Done(chunk=chunk), *self._announce()]
        if chunk.is_resend:
            raise LaneProtocolError("a second NACK of the same blocks")
        transfer.queued.appendleft(replace(chunk, is_resend=True))
        return self._announce_with(transfer)

    def _on_abort(self, abort: Abort) -> list[Action]:
        # From here on the receiver grants nothing more of this transfer.
        skipped = [
            seq
            for seq, entry in self._announced.items()
            if entry.chunk.transfer.transfer_id == abort.transfer_id and not entry.granted
        ]
        actions: list[Action] = [Done(chunk=self._announced.pop(seq).chunk) for seq in skipped]
        transfer = self._transfers.get(abort.transfer_id)
        if transfer is not None:
            actions += self.abort(transfer, abort.reason)
        return actions + self._announce()

    def _announce_with(self, transfer: OutgoingTransfer) -> list[Action]:
        if transfer not in self._turns:
            self._turns.append(transfer)
        return self._announce()

    def _announce(self) -> list[Action]:
        actions: list[Action] = []
        while self._turns and self._may_announce():
            transfer = self._turns.popleft()
            if not transfer.queued:
                continue
            chunk = transfer.queued.popleft()
            self._turns.append(transfer)
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            self._announced[seq] = _Announced(chunk)
            transfer.num_unsent += 1
            ready = Ready(
                seq=seq,
                transfer_id=transfer.transfer_id,
                first_block=chunk.first_block,
                num_blocks=chunk.num_blocks,
                size_bytes=chunk.num_blocks * self._block_bytes,
            )
            actions.append(Say(message=ready))
        return actions

    def _may_announce(self) -> bool:
        unshipped = sum(not entry.is_shipped for entry in self._announced.values())
        return len(self._announced) < self._window and unshipped < MAX_UNSHIPPED

    def _try_commit(self, transfer: OutgoingTransfer) -> list[Action]:
        if transfer.commit is None or transfer.ended or transfer.queued or transfer.num_unsent:
            return []
        commit, transfer.commit = transfer.commit, None
        return [Say(message=commit)]

    def _end(self, transfer: OutgoingTransfer, reason: str | None) -> list[Action]:
        transfer.ended = True
        del self._transfers[transfer.transfer_id]
        done: list[Action] = [Done(chunk=chunk) for chunk in transfer.queued]
        transfer.queued.clear()
        transfer.on_end(reason)
        return done
