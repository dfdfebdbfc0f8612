"""Two nodes and the lanes between them, for test_lane_machine.py: what can happen, as single moves.

    engine --write--> send pool --offer--> LaneSender ==to_receiver==> LaneReceiver
                                                      <==to_sender====      |
                                           plane: bytes, in no order        +--Copy--> receive pool

Control messages keep their order, each way. Pools, memory and state machines are the real ones;
only sockets and threads are missing. Engine writes and staging copies are two moves each, so that
anything may happen between their begin and their end. Every word of a token says whose it is.
"""

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvtransfer import receiver, sender
from kvtransfer.blocks import BlockPool, BlocksExhausted, Lease, LeaseReleased
from kvtransfer.chunk_bytes import digest, touched_blocks, write_chunk, zero_tail
from kvtransfer.inbox import Inbox, IncomingTransfer
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory
from kvtransfer.messages import Ack, Commit, FirstToken, Nack, NodeKey, Sent
from kvtransfer.receiver import LaneReceiver
from kvtransfer.sender import LaneSender, OutgoingTransfer

PREFILL = NodeKey(node_id="p", incarnation=1)
FIRST = FirstToken(choice=0, position=5, token_id=7)
# 4 words per token: K and V of two dims.
LAYOUT = KvLayout(
    model="toy",
    model_digest="00",
    dtype="float32",
    block_size=2,
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
)
OTHER_SHAPE = replace(LAYOUT, block_size=3, inner_order="L2SHD")
WORDS_PER_TOKEN = 4
NUM_SLOTS = 2
# More than there are slots, so that chunks wait for one.
NUM_ANNOUNCED = 3
NUM_BLOCKS = 7
CHUNK_DEADLINE_S = 5.0


# What can happen next, by name.
Moves = dict[str, Callable[[], None]]


@dataclass(kw_only=True, eq=False)
class Side:
    """A pool, its memory, and a plain account of who writes what."""

    pool: BlockPool
    memory: HostMemory
    writers: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(layout: KvLayout) -> "Side":
        return Side(pool=BlockPool(NUM_BLOCKS), memory=HostMemory(layout, NUM_BLOCKS))

    def reserve(self, num_tokens: int) -> Lease:
        lease = self.pool.reserve(self.memory.layout.blocks_for(num_tokens + 1))
        assert not set(lease.block_ids) & set(self.writers), "leased while written"
        return lease

    def begin_write(self, lease: Lease, block_ids: list[int], *, writer: str) -> None:
        self.pool.begin_write(lease, block_ids, writer=writer)
        for index in block_ids:
            assert index not in self.writers, "two writers"
            self.writers[index] = writer

    def end_write(self, block_ids: list[int], *, writer: str) -> None:
        for index in block_ids:
            assert self.writers.pop(index) == writer
        self.pool.end_write(block_ids, writer=writer)

    def words(self, lease: Lease) -> list[int]:
        data = b"".join(self.memory.block(index) for index in lease.block_ids)
        return words_of(data)


@dataclass(kw_only=True, eq=False)
class Request:
    """One prompt: its leases, its transfer on both sides, and how far it is."""

    owner: int
    num_tokens: int
    lane: "Lane"
    send_lease: Lease
    receive_lease: Lease
    outgoing: OutgoingTransfer
    incoming: IncomingTransfer
    sent: list[str | None]
    received: list[str | None]
    # Of the receiver's: nothing may be written there.
    num_cached_tokens: int
    num_computed: int = 0
    # Of blocks that the engine is writing now.
    num_writing: int = 0
    num_offered: int
    is_committed: bool = False
    is_cancelled: bool = False
    is_send_released: bool = False
    is_receive_released: bool = False

    @property
    def num_blocks(self) -> int:
        return LAYOUT.blocks_for(self.num_tokens)

    @property
    def first_block(self) -> int:
        """That is shipped."""
        return self.num_cached_tokens // LAYOUT.block_size

    @property
    def writing(self) -> list[int]:
        last = self.num_computed + self.num_writing
        return list(self.send_lease.block_ids[self.num_computed : last])

    def word(self, token: int) -> int:
        """0 is no token's."""
        return (self.owner << 8) + token + 1

    @property
    def words_or_none(self) -> set[int]:
        return {0} | {self.word(token) for token in range(self.num_tokens)}


@dataclass(kw_only=True, eq=False)
class Lane:
    """One epoch of the lane: both state machines and all that is between them."""

    epoch: int
    sender: LaneSender
    receiver: LaneReceiver
    to_receiver: deque = field(default_factory=deque)
    to_sender: deque = field(default_factory=deque)
    ships: deque[sender.Ship] = field(default_factory=deque)
    plane: dict[int, bytes] = field(default_factory=dict)
    # By seq, from the POST to the ACK or NACK; and what has arrived there.
    slots: dict[int, int] = field(default_factory=dict)
    arrived: dict[int, bytes] = field(default_factory=dict)
    copies: list[receiver.Copy] = field(default_factory=list)
    # The one under way, and whether the lease let it.
    copy: tuple[receiver.Copy, list[int], bool] | None = None
    # When granted and when shipped, of what is not complete.
    granted_at: dict[int, float] = field(default_factory=dict)
    shipped_at: dict[int, float] = field(default_factory=dict)
    seen_at: dict[int, float] = field(default_factory=dict)
    sent_heard: set[int] = field(default_factory=set)
    is_sender_closed: bool = False
    is_receiver_closed: bool = False

    @property
    def is_up(self) -> bool:
        return not self.is_sender_closed and not self.is_receiver_closed


class LaneWorld:
    """A prefill node with blocks of LAYOUT, a decode node with blocks of receiving."""

    def __init__(self, receiving: KvLayout) -> None:
        self.sending, self.receiving = Side.of(LAYOUT), Side.of(receiving)
        self.inbox = Inbox()
        self.now = 100.0
        self.requests: list[Request] = []
        self.lanes: list[Lane] = []
        self.open_lane()

    @property
    def lane(self) -> Lane:
        return self.lanes[-1]

    def open_lane(self) -> None:
        slot_bytes = 2 * LAYOUT.block_bytes
        lane = Lane(
            epoch=len(self.lanes) + 1,
            sender=LaneSender(
                num_slots=NUM_ANNOUNCED,
                slot_bytes=slot_bytes,
                block_bytes=LAYOUT.block_bytes,
                ack_deadline_s=CHUNK_DEADLINE_S,
            ),
            receiver=LaneReceiver(
                inbox=self.inbox,
                sender=PREFILL,
                layout=LAYOUT,
                num_slots=NUM_SLOTS,
                slot_bytes=slot_bytes,
                chunk_deadline_s=CHUNK_DEADLINE_S,
            ),
        )
        self.lanes.append(lane)

    def moves(self) -> Moves:
        """Everything by which work goes on. None left: all that can be done without trouble is."""
        return {**self._engine_moves(), **self._lane_moves()}

    def damage(self) -> Moves:
        """Bytes that arrive damaged."""
        arrive, lane = self._bytes_arrive, self.lane
        return {f"damage {seq}": partial(arrive, lane, seq, is_damaged=True) for seq in lane.plane}

    def _engine_moves(self) -> Moves:
        moves: Moves = {}
        for request in self.requests:
            who = request.owner
            left = request.num_blocks - request.num_computed
            if request.num_writing:
                moves[f"computed {who}"] = partial(self._end_compute, request)
            elif left and not request.is_send_released:
                for count in {left, 1}:
                    moves[f"compute {who}, {count}"] = partial(self._begin_compute, request, count)
            if request.outgoing.ended:
                continue
            if request.num_offered < request.num_computed:
                moves[f"offer {who}"] = partial(self._offer, request)
            if request.num_offered == request.num_blocks and not request.is_committed:
                moves[f"commit {who}"] = partial(self._commit, request)
        return moves

    def _lane_moves(self) -> Moves:
        moves: Moves = {}
        for lane in self.lanes:
            epoch = lane.epoch
            if lane.to_receiver:
                moves[f"receiver hears {epoch}"] = partial(self._receiver_hears, lane)
            if lane.to_sender:
                moves[f"sender hears {epoch}"] = partial(self._sender_hears, lane)
            if lane.ships:
                moves[f"ship {epoch}"] = partial(self._ship, lane)
            for seq in lane.plane:
                moves[f"bytes {epoch}.{seq}"] = partial(self._bytes_arrive, lane, seq)
            # On the lane's one thread, which outlives the lane.
            if lane.copy is not None:
                moves[f"copied {epoch}"] = partial(self._end_copy, lane)
            else:
                for copy in lane.copies:
                    moves[f"copy {epoch}.{copy.seq}"] = partial(self._begin_copy, lane, copy)
        return moves

    # Requests

    def start(self, num_tokens: int, *, num_cached_blocks: int = 0) -> None:
        """A request of num_tokens, if there are blocks for it; the receiver has so many already,
        but never the last token's."""
        if self.lane.is_sender_closed:
            return
        try:
            receive_lease = self.receiving.reserve(num_tokens)
        except BlocksExhausted:
            return
        try:
            send_lease = self.sending.reserve(num_tokens)
        except BlocksExhausted:
            self.receiving.pool.release(receive_lease)
            return
        # From here on another's word in these blocks is a late write. The sender's blocks keep
        # what they have: it must not be sent.
        for index in receive_lease.block_ids:
            self.receiving.memory.block(index)[:] = bytes(self.receiving.memory.layout.block_bytes)
        sent: list[str | None] = []
        received: list[str | None] = []
        size = self.receiving.memory.layout.block_size
        num_cached_tokens = size * min(num_cached_blocks, (num_tokens - 1) // size)
        incoming = self.inbox.expect(
            receive_lease,
            num_tokens=num_tokens,
            num_cached_tokens=num_cached_tokens,
            on_end=received.append,
        )
        outgoing = self.lane.sender.begin(
            incoming.transfer_id, lease=send_lease, num_tokens=num_tokens, on_end=sent.append
        )
        request = Request(
            owner=len(self.requests) + 1,
            num_tokens=num_tokens,
            lane=self.lane,
            send_lease=send_lease,
            receive_lease=receive_lease,
            outgoing=outgoing,
            incoming=incoming,
            sent=sent,
            received=received,
            num_cached_tokens=num_cached_tokens,
            num_offered=num_cached_tokens // LAYOUT.block_size,
        )
        self.requests.append(request)

    def abort_sending(self, request: Request) -> None:
        request.is_cancelled = True
        aborted = request.lane.sender.abort(request.outgoing, "cancelled")
        self._run_sender(request.lane, aborted)

    def abort_receiving(self, request: Request) -> None:
        """As a decode call ends: on the lane if the transfer is bound to one, else at once."""
        request.is_cancelled = True
        if request.incoming.sender is not None and not self.lane.is_receiver_closed:
            aborted = self.lane.receiver.abort(request.incoming, "cancelled")
            self._run_receiver(self.lane, aborted)
        else:
            self.inbox.end(request.incoming, "cancelled")

    def release(self, request: Request) -> None:
        """On the sides where the transfer has ended, whatever is in flight."""
        if request.sent:
            request.is_send_released = True
            self.sending.pool.release(request.send_lease)
        if request.received:
            request.is_receive_released = True
            self.receiving.pool.release(request.receive_lease)

    def _begin_compute(self, request: Request, num_blocks: int) -> None:
        request.num_writing = num_blocks
        writer = f"engine {request.owner}"
        self.sending.begin_write(request.send_lease, request.writing, writer=writer)

    def _end_compute(self, request: Request) -> None:
        for position, index in enumerate(request.writing, start=request.num_computed):
            block = self.sending.memory.block(index)
            for slot in range(LAYOUT.block_size):
                token = position * LAYOUT.block_size + slot
                if token < request.num_tokens:
                    _write_token(block, slot, request.word(token))
        self.sending.end_write(request.writing, writer=f"engine {request.owner}")
        request.num_computed += request.num_writing
        request.num_writing = 0

    def _offer(self, request: Request) -> None:
        first, count = request.num_offered, request.num_computed - request.num_offered
        block_ids = request.send_lease.block_ids[first : first + count]
        self.sending.pool.begin_read(request.send_lease, block_ids)
        request.num_offered += count
        lane = request.lane
        offered = lane.sender.offer(request.outgoing, first_block=first, num_blocks=count)
        self._run_sender(lane, offered)

    def _commit(self, request: Request) -> None:
        request.is_committed = True
        commit = Commit(
            transfer_id=request.outgoing.transfer_id,
            num_blocks=request.num_blocks - request.first_block,
            first_tokens=(FIRST,),
        )
        self._run_sender(request.lane, request.lane.sender.commit(request.outgoing, commit))

    # The streams and the plane

    def _run_sender(self, lane: Lane, actions: list[sender.Action]) -> None:
        for action in actions:
            match action:
                case sender.Say():
                    if not lane.is_sender_closed:
                        lane.to_receiver.append(action.message)
                case sender.Ship():
                    lane.ships.append(action)
                case sender.Done():
                    self.sending.pool.end_read(action.chunk.block_ids)

    def _run_receiver(self, lane: Lane, actions: list[receiver.Action]) -> None:
        for action in actions:
            match action:
                case receiver.Say(message=Ack(seq=seq) | Nack(seq=seq)):
                    lane.to_sender.append(action.message)
                    del lane.slots[seq], lane.arrived[seq]
                case receiver.Say():
                    lane.to_sender.append(action.message)
                case receiver.Post():
                    assert action.slot not in lane.slots.values(), "the slot is in use"
                    lane.slots[action.seq] = action.slot
                    lane.granted_at[action.seq] = self.now
                case receiver.Copy():
                    assert lane.slots[action.seq] == action.slot
                    lane.copies.append(action)

    def _receiver_hears(self, lane: Lane) -> None:
        message = lane.to_receiver.popleft()
        if lane.is_receiver_closed:
            return
        if isinstance(message, Sent):
            lane.sent_heard.add(message.seq)
            self._forget_grant_if_complete(lane, message.seq)
        self._run_receiver(lane, lane.receiver.handle(message, now=self.now))

    def _sender_hears(self, lane: Lane) -> None:
        message = lane.to_sender.popleft()
        if lane.is_sender_closed:
            return
        if isinstance(message, Ack | Nack):
            del lane.shipped_at[message.seq]
        self._run_sender(lane, lane.sender.handle(message))

    def _ship(self, lane: Lane) -> None:
        action = lane.ships.popleft()
        transfer, chunk = action.chunk.transfer, action.chunk
        with self.sending.memory.reading(chunk.block_ids) as blocks:
            views = list(blocks)
            last = chunk.first_block + chunk.num_blocks - 1
            num_tokens = transfer.num_tokens - last * LAYOUT.block_size
            if num_tokens < LAYOUT.block_size:
                views[-1] = zero_tail(views[-1], LAYOUT, num_tokens_in_block=num_tokens)
            data, checksum = b"".join(views), digest(views)
        # Also after an abort: the blocks are not yet anybody else's.
        request = next(r for r in self.requests if r.outgoing is transfer)
        assert set(words_of(data)) <= request.words_or_none, "another request's KV is sent"
        lane.plane[action.seq] = data
        lane.shipped_at[action.seq] = self.now
        self._run_sender(lane, lane.sender.shipped(action.seq, digest=checksum))

    def _bytes_arrive(self, lane: Lane, seq: int, *, is_damaged: bool = False) -> None:
        data = bytearray(lane.plane.pop(seq))
        if lane.is_receiver_closed:
            return
        if is_damaged:
            data[len(data) // 2] ^= 0x40
        lane.arrived[seq] = bytes(data)
        self._forget_grant_if_complete(lane, seq)
        arrived = lane.receiver.bytes_arrived(seq, digest([memoryview(data)]), now=self.now)
        self._run_receiver(lane, arrived)

    def _forget_grant_if_complete(self, lane: Lane, seq: int) -> None:
        if seq in lane.sent_heard and seq in lane.arrived:
            del lane.granted_at[seq]

    def _begin_copy(self, lane: Lane, copy: receiver.Copy) -> None:
        lane.copies.remove(copy)
        touched = touched_blocks(
            self.receiving.memory.layout,
            theirs=LAYOUT,
            first_block=copy.first_block,
            num_blocks=copy.num_blocks,
            num_tokens=copy.transfer.num_tokens,
            num_cached_tokens=copy.transfer.num_cached_tokens,
        )
        lease = copy.transfer.lease
        block_ids = [lease.block_ids[index] for index in touched]
        try:
            self.receiving.begin_write(lease, block_ids, writer=f"lane {lane.epoch}")
        except LeaseReleased:
            lane.copy = (copy, block_ids, False)
        else:
            lane.copy = (copy, block_ids, True)

    def _end_copy(self, lane: Lane) -> None:
        assert lane.copy is not None
        (copy, block_ids, may_write), lane.copy = lane.copy, None
        if may_write:
            write_chunk(
                self.receiving.memory,
                copy.transfer.lease.block_ids,
                memoryview(lane.arrived[copy.seq]),
                theirs=LAYOUT,
                first_block=copy.first_block,
                num_blocks=copy.num_blocks,
                num_tokens=copy.transfer.num_tokens,
                num_cached_tokens=copy.transfer.num_cached_tokens,
            )
            self.receiving.end_write(block_ids, writer=f"lane {lane.epoch}")
        if not lane.is_receiver_closed:
            self._run_receiver(lane, lane.receiver.copied(copy.seq, now=self.now))

    # Lanes that end

    def close_sender(self, lane: Lane) -> None:
        if not lane.is_sender_closed:
            lane.is_sender_closed = True
            lane.ships.clear()
            lane.shipped_at.clear()
            self._run_sender(lane, lane.sender.close("lane lost"))

    def close_receiver(self, lane: Lane) -> None:
        if not lane.is_receiver_closed:
            lane.is_receiver_closed = True
            lane.granted_at.clear()
            lane.receiver.close("lane lost")

    def reconnect(self) -> None:
        self.close_sender(self.lane)
        self.close_receiver(self.lane)
        self.open_lane()

    def time_passes(self, seconds: float) -> None:
        """A watchdog ends its side of a lane that is overdue; the other side notices later."""
        self.now += seconds
        lane, late = self.lane, self.now - CHUNK_DEADLINE_S
        if not lane.is_receiver_closed:
            is_overdue = any(at < late for at in lane.granted_at.values())
            assert lane.receiver.overdue(self.now) == is_overdue
            if is_overdue:
                self.close_receiver(lane)
        if not lane.is_sender_closed:
            # Its own chunks' time begins when they are first looked at; also those not shipped yet.
            lane.seen_at = {seq: lane.seen_at.get(seq, self.now) for seq in lane.shipped_at}
            is_overdue = lane.sender.overdue(self.now)
            assert is_overdue or all(at >= late for at in lane.seen_at.values())
            if is_overdue:
                self.close_sender(lane)


def words_of(data: bytes) -> list[int]:
    return [word for (word,) in struct.iter_unpack("<I", data)]


def _write_token(block: memoryview, slot: int, word: int) -> None:
    """The four words of a token in a block of LAYOUT: [2, S, D], one layer and one head."""
    for kv in range(2):
        for dim in range(LAYOUT.head_dim):
            position = (kv * LAYOUT.block_size + slot) * LAYOUT.head_dim + dim
            struct.pack_into("<I", block, 4 * position, word)
