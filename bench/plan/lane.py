"""A lane in simulated time: the real state machines of both ends, over links with a bandwidth.

    offer / commit --> LaneSender --messages--> LaneReceiver --> copy, ack, committed
                          bytes: out-link of the prefill node, in-link of the decode node

Every message of the lane takes the same time, so they stay in order. A lane ships one chunk at a
time; lanes of one node share its link, first come, first served.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.plan.clock import Clock
from kvtransfer import receiver, sender
from kvtransfer.blocks import BlockPool, Lease
from kvtransfer.inbox import Inbox
from kvtransfer.lane_service import NUM_SLOTS
from kvtransfer.layout import KvLayout
from kvtransfer.messages import Commit, FirstToken, NodeKey, ReceiverMessage, SenderMessage
from kvtransfer.planes import SLOT_TARGET_BYTES
from kvtransfer.receiver import LaneReceiver
from kvtransfer.sender import LaneSender, OutgoingTransfer, Ship


@dataclass(slots=True)
class Link:
    """One direction of a node's network; free_s is when it has moved all that it was given."""

    bytes_per_s: float
    free_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEnd:
    """What a lane uses of one of its nodes."""

    key: NodeKey
    pool: BlockPool
    link: Link


class SimulatedLane:
    """From one prefill node to one decode node, whose inbox it is."""

    def __init__(
        self,
        clock: Clock,
        *,
        source: LaneEnd,
        target: LaneEnd,
        inbox: Inbox,
        layout: KvLayout,
        message_s: float,
    ) -> None:
        self._clock = clock
        self._source = source
        self._target = target
        self._layout = layout
        self._message_s = message_s
        slot_bytes = max(1, SLOT_TARGET_BYTES // layout.block_bytes) * layout.block_bytes
        self._sender = LaneSender(
            num_slots=NUM_SLOTS, slot_bytes=slot_bytes, block_bytes=layout.block_bytes
        )
        self._receiver = LaneReceiver(
            inbox=inbox,
            sender=source.key,
            layout=layout,
            num_slots=NUM_SLOTS,
            slot_bytes=slot_bytes,
        )
        self._ships: deque[Ship] = deque()
        self._is_shipping = False

    def begin(
        self,
        transfer_id: bytes,
        *,
        lease: Lease,
        num_tokens: int,
        on_end: Callable[[str | None], None],
    ) -> OutgoingTransfer:
        return self._sender.begin(transfer_id, lease=lease, num_tokens=num_tokens, on_end=on_end)

    def offer(self, transfer: OutgoingTransfer, *, first_block: int, num_blocks: int) -> None:
        block_ids = transfer.lease.block_ids[first_block : first_block + num_blocks]
        self._source.pool.begin_read(transfer.lease, block_ids)
        self._send(self._sender.offer(transfer, first_block=first_block, num_blocks=num_blocks))

    def commit(
        self, transfer: OutgoingTransfer, *, num_blocks: int, first_token: FirstToken
    ) -> None:
        commit = Commit(
            transfer_id=transfer.transfer_id, num_blocks=num_blocks, first_tokens=(first_token,)
        )
        self._send(self._sender.commit(transfer, commit))

    def _send(self, actions: list[sender.Action]) -> None:
        for action in actions:
            match action:
                case sender.Say(message=message):
                    self._clock.after(self._message_s, partial(self._arrive, message))
                case sender.Ship():
                    self._ships.append(action)
                case sender.Done(chunk=chunk):
                    self._source.pool.end_read(chunk.block_ids)
        self._ship_next()

    def _arrive(self, message: SenderMessage) -> None:
        self._receive(self._receiver.handle(message, now=self._clock.now_s))

    def _answered(self, message: ReceiverMessage) -> None:
        self._send(self._sender.handle(message))

    def _receive(self, actions: list[receiver.Action]) -> None:
        for action in actions:
            match action:
                case receiver.Say(message=message):
                    self._clock.after(self._message_s, partial(self._answered, message))
                case receiver.Post():
                    pass  # The bytes need no slot here.
                case receiver.Copy():
                    self._copy(action)
                    self._receive(self._receiver.copied(action.seq, now=self._clock.now_s))

    def _copy(self, action: receiver.Copy) -> None:
        lease, writer = action.transfer.lease, f"lane {self._source.key}"
        end = action.first_block + action.num_blocks
        block_ids = lease.block_ids[action.first_block : end]
        self._target.pool.begin_write(lease, block_ids, writer=writer)
        self._target.pool.end_write(block_ids, writer=writer)

    def _ship_next(self) -> None:
        if self._is_shipping or not self._ships:
            return
        self._is_shipping = True
        ship = self._ships.popleft()
        size_bytes = ship.chunk.num_blocks * self._layout.block_bytes
        out, into = self._source.link, self._target.link
        start_s = max(self._clock.now_s, out.free_s, into.free_s)
        out.free_s = into.free_s = start_s + size_bytes / min(out.bytes_per_s, into.bytes_per_s)
        self._clock.at(out.free_s, partial(self._shipped, ship))

    def _shipped(self, ship: Ship) -> None:
        self._is_shipping = False
        # Before the sender says SENT: bytes are there first.
        self._receive(self._receiver.bytes_arrived(ship.seq, None, now=self._clock.now_s))
        self._send(self._sender.shipped(ship.seq, digest=None))
