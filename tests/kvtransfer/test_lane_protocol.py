"""Both ends of a lane, joined by queues that hypothesis drains in any order it likes.

Bytes are a dict: what a chunk carries is (sender block) -> a value unique to transfer and block,
so that a block with somebody else's KV is seen at once.
"""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer import receiver, sender
from kvtransfer.blocks import BlockPool, BlocksExhausted, LeaseReleased
from kvtransfer.inbox import Inbox
from kvtransfer.messages import Commit, FirstToken, Grant, NodeKey, Ready, Sent
from kvtransfer.receiver import LaneProtocolError, LaneReceiver
from kvtransfer.sender import LaneSender

PREFILL = NodeKey(node_id="p", incarnation=1)
BLOCK = 10
FIRST = FirstToken(choice=0, position=5, token_id=7)


def make_receiver(inbox: Inbox, *, num_slots: int = 2) -> LaneReceiver:
    return LaneReceiver(
        inbox=inbox, sender=PREFILL, num_slots=num_slots, slot_bytes=2 * BLOCK, block_bytes=BLOCK
    )


def ready(transfer_id: bytes, *, seq: int = 0, first_block: int = 0, num_blocks: int = 1) -> Ready:
    return Ready(
        seq=seq,
        transfer_id=transfer_id,
        first_block=first_block,
        num_blocks=num_blocks,
        size_bytes=num_blocks * BLOCK,
    )


def expect(inbox: Inbox, *, num_blocks: int = 2):
    ends: list[str | None] = []
    transfer = inbox.expect(BlockPool(8).reserve(4), num_blocks=num_blocks, on_end=ends.append)
    return transfer, ends


def test_a_ready_for_an_unknown_transfer_is_answered_with_an_abort():
    lane = make_receiver(Inbox())
    (action,) = lane.handle(ready(b"nobody"), now=0)
    assert isinstance(action, receiver.Say)
    assert action.message.reason == "unknown transfer"
    assert lane.num_busy_slots == 0


def test_another_node_cannot_write_to_a_transfer_that_is_bound():
    inbox = Inbox()
    transfer, _ = expect(inbox)
    inbox.find(transfer.transfer_id, sender=NodeKey(node_id="other", incarnation=1))
    (action,) = make_receiver(inbox).handle(ready(transfer.transfer_id), now=0)
    assert action.message.reason == "unknown transfer"


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([(0, 1), (0, 1)], "chunk sent twice"),
        ([(1, 2)], "chunk past the transfer's end"),
    ],
)
def test_bad_chunks_abort_their_transfer(chunks, reason):
    inbox = Inbox()
    transfer, ends = expect(inbox)
    lane = make_receiver(inbox)
    for seq, (first, count) in enumerate(chunks):
        lane.handle(
            ready(transfer.transfer_id, seq=seq, first_block=first, num_blocks=count), now=0
        )
    assert ends == [reason]
    assert len(inbox) == 0


def test_a_commit_with_missing_chunks_aborts():
    inbox = Inbox()
    transfer, ends = expect(inbox)
    lane = make_receiver(inbox)
    lane.handle(ready(transfer.transfer_id), now=0)
    commit = Commit(transfer_id=transfer.transfer_id, num_blocks=2, first_tokens=(FIRST,))
    lane.handle(commit, now=0)
    assert ends == ["commit with missing chunks"]


def test_a_wrong_digest_aborts_and_frees_the_slot():
    inbox = Inbox()
    transfer, ends = expect(inbox, num_blocks=1)
    lane = make_receiver(inbox)
    lane.handle(ready(transfer.transfer_id), now=0)
    lane.handle(Sent(seq=0, digest=1), now=0)
    lane.bytes_arrived(0, 2, now=0)
    assert ends == ["chunk digest differs"]
    assert lane.num_busy_slots == 0


def test_a_chunk_that_completes_after_an_abort_is_dropped_and_acknowledged():
    inbox = Inbox()
    transfer, _ = expect(inbox, num_blocks=1)
    lane = make_receiver(inbox)
    lane.handle(ready(transfer.transfer_id), now=0)
    lane.abort(transfer, "cancelled")
    lane.bytes_arrived(0, 1, now=0)
    actions = lane.handle(Sent(seq=0, digest=1), now=0)
    assert not any(isinstance(action, receiver.Copy) for action in actions)
    assert lane.num_dropped_chunks == 1
    assert lane.num_busy_slots == 0


def test_a_granted_chunk_that_never_completes_is_overdue():
    inbox = Inbox()
    transfer, _ = expect(inbox)
    lane = make_receiver(inbox)
    lane.handle(ready(transfer.transfer_id), now=100)
    assert not lane.overdue(105)
    assert lane.overdue(105.1)


@pytest.mark.parametrize("message", [Sent(seq=0, digest=0), ready(b"x", seq=3)])
def test_breaking_the_protocol_ends_the_lane(message):
    with pytest.raises(LaneProtocolError):
        make_receiver(Inbox()).handle(message, now=0)


def test_a_grant_that_was_not_asked_for_ends_the_lane():
    lane = LaneSender(num_slots=1, slot_bytes=BLOCK, block_bytes=BLOCK)
    with pytest.raises(LaneProtocolError):
        lane.handle(Grant(seq=0))


def test_transfers_take_turns_chunk_by_chunk():
    lane = LaneSender(num_slots=3, slot_bytes=BLOCK, block_bytes=BLOCK)
    pool = BlockPool(9)
    long = lane.begin(b"long", lease=pool.reserve(6), on_end=lambda _: None)
    short = lane.begin(b"short", lease=pool.reserve(1), on_end=lambda _: None)
    said = lane.offer(long, first_block=0, num_blocks=6)
    said += lane.offer(short, first_block=0, num_blocks=1)
    assert [action.message.transfer_id for action in said] == [b"long"] * 3
    (ship,) = lane.handle(Grant(seq=0))
    lane.shipped(ship.seq, digest=0, now=0)
    _, say = lane.handle(receiver.Ack(seq=0))
    assert say.message.transfer_id == b"short" or lane._turns[0] is short


class LaneMachine(RuleBasedStateMachine):
    """Random transfers, aborts on both sides, any delivery order the streams allow."""

    def __init__(self) -> None:
        super().__init__()
        self.send_pool, self.receive_pool = BlockPool(12), BlockPool(12)
        self.send_kv: dict[int, object] = {}
        self.receive_kv: dict[int, object] = {}
        self.inbox = Inbox()
        self.receiver = make_receiver(self.inbox)
        self.sender = LaneSender(num_slots=2, slot_bytes=2 * BLOCK, block_bytes=BLOCK)
        self.to_receiver: deque = deque()
        self.to_sender: deque = deque()
        self.ships: deque[sender.Ship] = deque()
        self.plane: deque[tuple[int, list[object]]] = deque()
        self.slots: dict[int, tuple[int, list[object]]] = {}
        self.posts: dict[int, int] = {}
        self.copies: list[receiver.Copy] = []
        self.open: list[dict] = []
        self.closed: list[dict] = []
        self.count = 0

    def run_receiver(self, actions) -> None:
        for action in actions:
            if isinstance(action, receiver.Say):
                self.to_sender.append(action.message)
            elif isinstance(action, receiver.Post):
                self.posts[action.seq] = action.slot
            else:
                self.copies.append(action)

    def run_sender(self, actions) -> None:
        for action in actions:
            if isinstance(action, sender.Say):
                self.to_receiver.append(action.message)
            elif isinstance(action, sender.Ship):
                self.ships.append(action)
            else:
                self.send_pool.end_read(action.chunk.block_ids)

    @rule(num_blocks=st.integers(1, 5))
    def start(self, num_blocks: int):
        try:
            receive_lease = self.receive_pool.reserve(num_blocks + 1)
        except BlocksExhausted:
            return
        try:
            send_lease = self.send_pool.reserve(num_blocks + 1)
        except BlocksExhausted:
            self.receive_pool.release(receive_lease)
            return
        record = {"n": num_blocks, "received": [], "sent": [], "offered": 0, "id": self.count}
        self.count += 1
        record["in"] = self.inbox.expect(
            receive_lease, num_blocks=num_blocks, on_end=record["received"].append
        )
        record["out"] = self.sender.begin(
            record["in"].transfer_id, lease=send_lease, on_end=record["sent"].append
        )
        record["leases"] = (send_lease, receive_lease)
        self.open.append(record)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def compute(self, data):
        record = data.draw(st.sampled_from(self.open))
        left = record["n"] - record["offered"]
        if not left or record["out"].ended:
            return
        count = data.draw(st.integers(1, left))
        first = record["offered"]
        lease = record["leases"][0]
        block_ids = lease.block_ids[first : first + count]
        self.send_pool.begin_write(lease, block_ids, writer="engine")
        for offset, index in enumerate(block_ids):
            self.send_kv[index] = (record["id"], first + offset)
        self.send_pool.end_write(block_ids, writer="engine")
        self.send_pool.begin_read(lease, block_ids)
        record["offered"] += count
        self.run_sender(self.sender.offer(record["out"], first_block=first, num_blocks=count))
        if record["offered"] == record["n"]:
            commit = Commit(
                transfer_id=record["out"].transfer_id,
                num_blocks=record["n"],
                first_tokens=(FIRST,),
            )
            self.run_sender(self.sender.commit(record["out"], commit))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), side=st.sampled_from(["sender", "receiver"]))
    def cancel(self, data, side):
        record = data.draw(st.sampled_from(self.open))
        if side == "sender":
            self.run_sender(self.sender.abort(record["out"], "cancelled"))
        else:
            self.run_receiver(self.receiver.abort(record["in"], "cancelled"))

    @precondition(lambda self: self.to_receiver)
    @rule()
    def deliver_to_receiver(self):
        self.run_receiver(self.receiver.handle(self.to_receiver.popleft(), now=0))

    @precondition(lambda self: self.to_sender)
    @rule()
    def deliver_to_sender(self):
        self.run_sender(self.sender.handle(self.to_sender.popleft()))

    @precondition(lambda self: self.ships)
    @rule()
    def ship(self):
        action = self.ships.popleft()
        self.plane.append((action.seq, [self.send_kv[i] for i in action.chunk.block_ids]))
        self.run_sender(self.sender.shipped(action.seq, digest=action.seq, now=0))

    @precondition(lambda self: self.plane)
    @rule()
    def deliver_bytes(self):
        seq, values = self.plane.popleft()
        self.slots[self.posts.pop(seq)] = (seq, values)
        self.run_receiver(self.receiver.bytes_arrived(seq, seq, now=0))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy(self, data):
        self.finish_copy(data.draw(st.sampled_from(self.copies)))

    def finish_copy(self, action: receiver.Copy) -> None:
        self.copies.remove(action)
        lease = action.transfer.lease
        block_ids = lease.block_ids[action.first_block : action.first_block + action.num_blocks]
        seq, values = self.slots.pop(action.slot)
        assert seq == action.seq
        try:
            self.receive_pool.begin_write(lease, block_ids, writer="lane")
        except LeaseReleased:
            pass
        else:
            self.receive_kv.update(zip(block_ids, values, strict=True))
            self.receive_pool.end_write(block_ids, writer="lane")
        self.run_receiver(self.receiver.copied(action.seq, now=0))

    @rule()
    def settle(self):
        for record in [r for r in self.open if r["received"] or r["sent"]]:
            send_lease, receive_lease = record["leases"]
            if record["received"] == [None]:
                got = [self.receive_kv[i] for i in receive_lease.block_ids[: record["n"]]]
                assert got == [(record["id"], i) for i in range(record["n"])]
            if record["received"]:
                self.receive_pool.release(receive_lease)
            if record["sent"]:
                self.send_pool.release(send_lease)
            if record["received"] and record["sent"]:
                self.open.remove(record)
                self.closed.append(record)

    @invariant()
    def a_transfer_ends_once_on_each_side(self):
        for record in self.open + self.closed:
            assert len(record["received"]) <= 1
            assert len(record["sent"]) <= 1

    @invariant()
    def granted_chunks_fit_the_ring(self):
        assert self.receiver.num_busy_slots <= 2

    def teardown(self):
        for record in self.open:
            self.run_sender(self.sender.abort(record["out"], "end"))
        while self.to_receiver or self.to_sender or self.ships or self.plane or self.copies:
            for queue, act in (
                (self.to_receiver, self.deliver_to_receiver),
                (self.to_sender, self.deliver_to_sender),
                (self.ships, self.ship),
                (self.plane, self.deliver_bytes),
            ):
                if queue:
                    act()
            while self.copies:
                self.finish_copy(self.copies[-1])
        self.settle()
        # What the receiver had no READY for stays expected until its servicer gives up.
        for record in self.open:
            if not record["received"]:
                self.run_receiver(self.receiver.abort(record["in"], "end"))
        self.settle()
        assert not self.open
        assert len(self.inbox) == 0
        assert self.receiver.num_busy_slots == 0
        for pool in (self.send_pool, self.receive_pool):
            assert pool.counts().available == pool.num_blocks


TestLaneMachine = LaneMachine.TestCase
TestLaneMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
