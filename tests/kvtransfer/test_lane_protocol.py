"""Each end of a lane on its own, one event after another: the outcomes that receiver.py's table
and sender.py promise. tests/kvtransfer/test_lane_machine.py joins the two ends."""

from dataclasses import replace

import pytest

from kvtransfer import receiver, sender
from kvtransfer.blocks import BlockPool
from kvtransfer.inbox import Inbox, IncomingTransfer
from kvtransfer.layout import KvLayout
from kvtransfer.messages import (
    Abort,
    Ack,
    Commit,
    Committed,
    FirstToken,
    Grant,
    Nack,
    NodeKey,
    Ready,
    Sent,
)
from kvtransfer.receiver import LaneProtocolError, LaneReceiver
from kvtransfer.sender import LaneSender, OutgoingTransfer
from kvtransfer.wire import (
    receiver_message_from_pb,
    receiver_message_to_pb,
    sender_message_from_pb,
    sender_message_to_pb,
)

PREFILL = NodeKey(node_id="p", incarnation=1)
LAYOUT = KvLayout(
    model="toy",
    model_digest="00",
    dtype="bfloat16",
    block_size=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
BLOCK = 1 * 2 * 1 * 4 * 1 * 2
FIRST = FirstToken(choice=0, position=5, token_id=7)


class Incoming:
    """A receiver with one expected transfer of num_blocks blocks."""

    def __init__(self, *, num_blocks: int = 2, num_slots: int = 2) -> None:
        self.inbox = Inbox()
        self.lane = LaneReceiver(
            inbox=self.inbox,
            sender=PREFILL,
            layout=LAYOUT,
            num_slots=num_slots,
            slot_bytes=2 * BLOCK,
        )
        self.ends: list[str | None] = []
        self.transfer = self.expect(num_tokens=4 * num_blocks, ends=self.ends)
        self.id = self.transfer.transfer_id

    def expect(
        self, *, num_tokens: int, ends: list[str | None], num_cached_tokens: int = 0
    ) -> IncomingTransfer:
        lease = BlockPool(8).reserve(8)
        return self.inbox.expect(
            lease,
            num_tokens=num_tokens,
            num_cached_tokens=num_cached_tokens,
            on_end=ends.append,
        )

    def hear(self, message) -> list[receiver.Action]:
        return self.lane.handle(message, now=0)

    def ready(self, seq: int = 0, *, first_block: int = 0, num_blocks: int = 1, id=None):
        return self.hear(
            Ready(
                seq=seq,
                transfer_id=id or self.id,
                first_block=first_block,
                num_blocks=num_blocks,
                size_bytes=num_blocks * BLOCK,
            )
        )

    def arrive(self, seq: int, *, told: int = 5, found: int | None = 5) -> list[receiver.Action]:
        """SENT with one digest, bytes with another."""
        assert self.hear(Sent(seq=seq, digest=told)) == []
        return self.lane.bytes_arrived(seq, found, now=0)

    def copy(self, seq: int, **ready) -> list[receiver.Action]:
        """A chunk from READY to its last action."""
        self.ready(seq, **ready)
        (action,) = self.arrive(seq)
        assert isinstance(action, receiver.Copy)
        return self.lane.copied(seq, now=0)

    def commit(self, num_blocks: int = 2) -> list[receiver.Action]:
        return self.hear(Commit(transfer_id=self.id, num_blocks=num_blocks, first_tokens=(FIRST,)))


def said(actions) -> list[object]:
    return [action.message for action in actions if isinstance(action, receiver.Say | sender.Say)]


# READY


def test_a_ready_posts_a_slot_before_its_grant():
    incoming = Incoming()
    post, grant = incoming.ready(num_blocks=2)
    assert (post.seq, post.size_bytes) == (0, 2 * BLOCK)
    assert grant.message == Grant(seq=0)


def test_a_ready_for_an_unknown_transfer_is_answered_with_an_abort():
    incoming = Incoming()
    assert said(incoming.ready(id=b"nobody")) == [
        Abort(transfer_id=b"nobody", reason="unknown transfer")
    ]
    assert incoming.lane.num_busy_slots == 0


def test_another_node_cannot_write_to_a_transfer_that_is_bound():
    incoming = Incoming()
    incoming.inbox.find(incoming.id, sender=NodeKey(node_id="other", incarnation=1))
    (abort,) = said(incoming.ready())
    assert abort.reason == "unknown transfer"
    assert incoming.ends == []


def test_a_late_ready_of_a_transfer_that_was_sealed_gets_no_slot():
    incoming = Incoming(num_blocks=1)
    incoming.copy(0)
    incoming.commit(1)
    (abort,) = said(incoming.ready(1))
    assert abort.reason == "unknown transfer"
    assert incoming.ends == [None]


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([(0, 1), (0, 1)], "chunk sent twice"),
        ([(0, 1), (0, 2)], "chunk sent twice"),
        ([(1, 2)], "chunk past the transfer's end"),
        ([(2**32 - 1, 1)], "chunk past the transfer's end"),
    ],
)
def test_bad_chunks_abort_their_transfer(chunks, reason):
    incoming = Incoming()
    for seq, (first, count) in enumerate(chunks):
        incoming.ready(seq, first_block=first, num_blocks=count)
    assert incoming.ends == [reason]
    assert len(incoming.inbox) == 0


@pytest.mark.parametrize(("num_tokens", "last_block"), [(1, 0), (3, 0), (4, 0), (5, 1), (123, 30)])
def test_a_transfer_ends_with_the_senders_block_of_its_last_token(num_tokens, last_block):
    incoming = Incoming()
    ends: list[str | None] = []
    transfer = incoming.expect(num_tokens=num_tokens, ends=ends)
    incoming.ready(0, id=transfer.transfer_id, first_block=last_block)
    assert ends == []
    incoming.ready(1, id=transfer.transfer_id, first_block=last_block + 1)
    assert ends == ["chunk past the transfer's end"]


# Blocks of 4 tokens. A cached prefix that ends inside one, on a node whose blocks are smaller.
@pytest.mark.parametrize(("num_cached_tokens", "first_block"), [(3, 0), (4, 1), (6, 1), (8, 2)])
def test_a_transfer_behind_a_cached_prefix_begins_with_the_block_of_the_first_missing_token(
    num_cached_tokens, first_block
):
    incoming = Incoming()
    ends: list[str | None] = []
    transfer = incoming.expect(num_tokens=9, ends=ends, num_cached_tokens=num_cached_tokens)
    num_due = 3 - first_block
    for seq, block in enumerate(range(first_block, 3)):
        incoming.copy(seq, id=transfer.transfer_id, first_block=block)
    assert ends == []
    incoming.hear(
        Commit(transfer_id=transfer.transfer_id, num_blocks=num_due, first_tokens=(FIRST,))
    )
    assert ends == [None]


def test_a_chunk_of_the_cached_prefix_aborts_its_transfer():
    incoming = Incoming()
    ends: list[str | None] = []
    transfer = incoming.expect(num_tokens=9, ends=ends, num_cached_tokens=4)
    incoming.ready(0, id=transfer.transfer_id, first_block=0, num_blocks=2)
    assert ends == ["chunk of a prefix that is here"]


READY = Ready(seq=0, transfer_id=b"x", first_block=0, num_blocks=1, size_bytes=BLOCK)


@pytest.mark.parametrize(
    "message",
    [
        Sent(seq=0, digest=0),
        replace(READY, seq=3),
        replace(READY, num_blocks=0, size_bytes=0),
        replace(READY, size_bytes=BLOCK + 1),
        replace(READY, num_blocks=3, size_bytes=3 * BLOCK),
    ],
)
def test_breaking_the_protocol_ends_the_lane(message):
    with pytest.raises(LaneProtocolError):
        Incoming().hear(message)


def test_a_chunk_that_is_sent_twice_under_one_seq_ends_the_lane():
    incoming = Incoming()
    incoming.ready()
    incoming.hear(Sent(seq=0, digest=1))
    with pytest.raises(LaneProtocolError):
        incoming.hear(Sent(seq=0, digest=1))


def test_a_chunk_without_a_slot_waits_for_the_first_that_comes_free():
    incoming = Incoming(num_slots=1)
    incoming.ready(0)
    assert incoming.ready(1, first_block=1) == []
    incoming.arrive(0)
    assert said(incoming.lane.copied(0, now=0)) == [Ack(seq=0), Grant(seq=1)]


# Bytes


@pytest.mark.parametrize(("told", "found"), [(7, 7), (0, None)])
def test_a_chunk_is_copied_when_digests_agree_or_are_taken_by_nobody(told, found):
    incoming = Incoming()
    incoming.ready(first_block=1)
    (copy,) = incoming.arrive(0, told=told, found=found)
    assert (copy.transfer, copy.first_block, copy.num_blocks) == (incoming.transfer, 1, 1)


@pytest.mark.parametrize(("told", "found"), [(7, 8), (0, 7), (7, None)])
def test_a_wrong_digest_is_refused_once_and_frees_the_slot(told, found):
    incoming = Incoming(num_slots=1)
    incoming.ready(0)
    incoming.ready(1, first_block=1)
    assert said(incoming.arrive(0, told=told, found=found)) == [Nack(seq=0), Grant(seq=1)]
    assert incoming.lane.num_bad_chunks == 1
    assert incoming.ends == []


def test_the_same_blocks_are_taken_again_under_a_new_seq():
    incoming = Incoming(num_blocks=1)
    incoming.ready(0)
    incoming.arrive(0, found=6)
    assert said(incoming.copy(1)) == [Ack(seq=1)]
    assert said(incoming.commit(1)) == [Committed(transfer_id=incoming.id)]
    assert incoming.ends == [None]


def test_blocks_that_are_due_again_can_be_announced_only_once():
    incoming = Incoming(num_blocks=1)
    incoming.ready(0)
    incoming.arrive(0, found=6)
    incoming.ready(1)
    incoming.ready(2)
    assert incoming.ends == ["chunk sent twice"]


def test_a_second_wrong_digest_of_the_same_blocks_aborts():
    incoming = Incoming(num_blocks=1)
    incoming.ready(0)
    incoming.arrive(0, found=6)
    incoming.ready(1)
    reason = "chunk digest differs"
    assert said(incoming.arrive(1, found=6)) == [
        Ack(seq=1),
        Abort(transfer_id=incoming.id, reason=reason),
    ]
    assert incoming.ends == [reason]
    assert incoming.lane.num_bad_chunks == 2
    assert incoming.lane.num_busy_slots == 0


def test_each_block_has_a_resend_of_its_own():
    incoming = Incoming(num_blocks=2)
    for seq in (0, 1):
        incoming.ready(seq, first_block=seq)
        assert said(incoming.arrive(seq, found=6)) == [Nack(seq=seq)]
    assert incoming.ends == []


@pytest.mark.parametrize("found", [5, 6])
def test_a_chunk_that_completes_after_an_abort_is_dropped_and_acknowledged(found):
    incoming = Incoming()
    incoming.ready()
    incoming.lane.abort(incoming.transfer, "cancelled")
    assert incoming.arrive(0, found=found) == [receiver.Say(message=Ack(seq=0))]
    assert (incoming.lane.num_dropped_chunks, incoming.lane.num_bad_chunks) == (1, 0)
    assert incoming.lane.num_busy_slots == 0


def test_a_copy_that_ends_after_an_abort_is_acknowledged():
    incoming = Incoming(num_blocks=1)
    incoming.ready()
    incoming.arrive(0)
    incoming.commit(1)
    incoming.lane.abort(incoming.transfer, "cancelled")
    assert said(incoming.lane.copied(0, now=0)) == [Ack(seq=0)]
    assert incoming.ends == ["cancelled"]


def test_a_granted_chunk_that_never_completes_is_overdue():
    incoming = Incoming()
    ready = replace(READY, transfer_id=incoming.id)
    incoming.lane.handle(ready, now=100)
    assert not incoming.lane.overdue(103.5)
    assert incoming.lane.overdue(103.6)


# COMMIT


def test_a_commit_seals_when_all_chunks_are_copied():
    incoming = Incoming()
    incoming.copy(0, num_blocks=2)
    assert said(incoming.commit()) == [Committed(transfer_id=incoming.id)]
    assert incoming.ends == [None]
    assert incoming.transfer.first_tokens == (FIRST,)


def test_an_early_commit_waits_for_chunks_in_flight():
    incoming = Incoming(num_slots=1)
    incoming.ready(0)
    incoming.ready(1, first_block=1)
    assert incoming.commit() == []
    incoming.arrive(0)
    assert said(incoming.lane.copied(0, now=0)) == [Ack(seq=0), Grant(seq=1)]
    incoming.arrive(1)
    assert said(incoming.lane.copied(1, now=0)) == [Ack(seq=1), Committed(transfer_id=incoming.id)]


@pytest.mark.parametrize("order", ["commit first", "damage first"])
def test_a_commit_waits_for_chunks_that_are_due_again(order):
    incoming = Incoming(num_blocks=1)
    incoming.ready(0)
    if order == "commit first":
        assert incoming.commit(1) == []
    incoming.arrive(0, found=6)
    if order == "damage first":
        assert incoming.commit(1) == []
    assert said(incoming.copy(1)) == [Ack(seq=1), Committed(transfer_id=incoming.id)]
    assert incoming.ends == [None]


def test_a_commit_that_waits_ends_with_a_second_wrong_digest():
    incoming = Incoming(num_blocks=1)
    incoming.ready(0)
    incoming.commit(1)
    incoming.arrive(0, found=6)
    incoming.ready(1)
    incoming.arrive(1, found=6)
    assert incoming.ends == ["chunk digest differs"]
    assert incoming.commit(1) == []


@pytest.mark.parametrize(("announced", "num_blocks"), [(0, 2), (1, 2), (1, 1), (2, 1), (2, 3)])
def test_a_commit_with_missing_chunks_or_of_another_length_aborts(announced, num_blocks):
    incoming = Incoming()
    for block in range(announced):
        incoming.ready(block, first_block=block)
    (abort,) = said(incoming.commit(num_blocks))
    assert abort.reason == "commit with missing chunks"
    assert incoming.ends == ["commit with missing chunks"]


def test_a_second_commit_aborts_while_the_first_one_waits():
    incoming = Incoming(num_blocks=1)
    incoming.ready()
    incoming.commit(1)
    incoming.commit(1)
    assert incoming.ends == ["committed twice"]


def test_a_commit_after_the_end_is_nothing():
    incoming = Incoming(num_blocks=1)
    incoming.copy(0)
    incoming.commit(1)
    assert incoming.commit(1) == []
    assert incoming.hear(Commit(transfer_id=b"nobody", num_blocks=1, first_tokens=())) == []
    assert incoming.ends == [None]


# ABORT


def test_an_abort_is_answered_and_skips_chunks_that_have_no_grant():
    incoming = Incoming(num_slots=1)
    incoming.ready(0)
    incoming.ready(1, first_block=1)
    abort = Abort(transfer_id=incoming.id, reason="cancelled")
    assert said(incoming.hear(abort)) == [abort]
    assert incoming.ends == ["cancelled"]
    assert said(incoming.arrive(0)) == [Ack(seq=0)]
    assert incoming.lane.num_busy_slots == 0


def test_an_abort_of_what_is_unknown_or_over_is_nothing():
    incoming = Incoming()
    abort = Abort(transfer_id=incoming.id, reason="cancelled")
    incoming.hear(abort)
    assert incoming.hear(abort) == []
    assert incoming.hear(Abort(transfer_id=b"nobody", reason="")) == []
    assert incoming.ends == ["cancelled"]


def test_an_abort_forgets_blocks_that_are_due_again():
    incoming = Incoming(num_blocks=1)
    incoming.ready(0)
    incoming.arrive(0, found=6)
    incoming.lane.abort(incoming.transfer, "cancelled")
    (abort,) = said(incoming.ready(1))
    assert abort.reason == "unknown transfer"


def test_a_lane_that_is_gone_ends_its_transfers_and_no_others():
    incoming = Incoming()
    others: list[str | None] = []
    incoming.expect(num_tokens=4, ends=others)
    incoming.ready()
    incoming.lane.close("lane lost")
    assert (incoming.ends, others) == (["lane lost"], [])


# The sender


class Outgoing:
    """A sender with one transfer of num_blocks blocks, one block per chunk, all offered."""

    def __init__(self, *, num_blocks: int = 2, num_slots: int = 2) -> None:
        self.lane = LaneSender(num_slots=num_slots, slot_bytes=BLOCK, block_bytes=BLOCK)
        self.num_blocks = num_blocks
        self.ends: list[str | None] = []
        self.transfer = self.begin(b"one", num_blocks=num_blocks, ends=self.ends)
        self.offered = self.lane.offer(self.transfer, first_block=0, num_blocks=num_blocks)

    def begin(self, transfer_id: bytes, *, num_blocks: int, ends=None) -> OutgoingTransfer:
        on_end = (ends if ends is not None else []).append
        lease = BlockPool(num_blocks).reserve(num_blocks)
        return self.lane.begin(transfer_id, lease=lease, num_tokens=4 * num_blocks, on_end=on_end)

    def send(self, seq: int) -> list[sender.Action]:
        (ship,) = self.lane.handle(Grant(seq=seq))
        assert ship.seq == seq
        return self.lane.shipped(seq, digest=7)

    def commit(self) -> list[sender.Action]:
        commit = Commit(transfer_id=b"one", num_blocks=self.num_blocks, first_tokens=(FIRST,))
        return self.lane.commit(self.transfer, commit)


def blocks_done(actions) -> list[int]:
    return [action.chunk.first_block for action in actions if isinstance(action, sender.Done)]


def test_no_more_chunks_are_announced_than_there_are_slots():
    outgoing = Outgoing(num_blocks=3, num_slots=2)
    assert [ready.seq for ready in said(outgoing.offered)] == [0, 1]
    outgoing.send(0)
    (ready,) = said(outgoing.lane.handle(Ack(seq=0)))
    assert (ready.seq, ready.first_block) == (2, 2)


def test_a_commit_is_said_after_the_last_sent():
    outgoing = Outgoing()
    assert outgoing.commit() == []
    outgoing.send(1)
    sent, commit = said(outgoing.send(0))
    assert (sent, commit.num_blocks) == (Sent(seq=0, digest=7), 2)
    outgoing.lane.handle(Committed(transfer_id=b"one"))
    assert outgoing.ends == [None]


def test_a_chunk_without_a_digest_is_sent_as_zero():
    outgoing = Outgoing()
    outgoing.lane.handle(Grant(seq=0))
    (sent,) = said(outgoing.lane.shipped(0, digest=None))
    assert sent.digest == 0


def test_a_refused_chunk_is_announced_again_before_the_others_and_stays_claimed():
    outgoing = Outgoing(num_blocks=3, num_slots=1)
    outgoing.send(0)
    actions = outgoing.lane.handle(Nack(seq=0))
    (ready,) = said(actions)
    assert (ready.seq, ready.first_block) == (1, 0)
    assert blocks_done(actions) == []
    outgoing.send(1)
    actions = outgoing.lane.handle(Ack(seq=1))
    assert blocks_done(actions) == [0]
    assert [ready.first_block for ready in said(actions)] == [1]


def test_a_chunk_that_is_refused_after_the_commit_is_sent_again_and_committed_once():
    outgoing = Outgoing(num_blocks=1)
    outgoing.commit()
    assert len(said(outgoing.send(0))) == 2
    (ready,) = said(outgoing.lane.handle(Nack(seq=0)))
    assert said(outgoing.send(ready.seq)) == [Sent(seq=1, digest=7)]
    assert blocks_done(outgoing.lane.handle(Ack(seq=1))) == [0]
    outgoing.lane.handle(Committed(transfer_id=b"one"))
    assert outgoing.ends == [None]


def test_a_commit_waits_for_a_chunk_that_was_refused_before_it():
    outgoing = Outgoing(num_blocks=1)
    outgoing.send(0)
    outgoing.lane.handle(Nack(seq=0))
    assert outgoing.commit() == []
    assert len(said(outgoing.send(1))) == 2


def test_a_chunk_that_is_refused_after_its_transfers_end_is_done():
    outgoing = Outgoing(num_blocks=1)
    outgoing.send(0)
    outgoing.lane.abort(outgoing.transfer, "cancelled")
    actions = outgoing.lane.handle(Nack(seq=0))
    assert (blocks_done(actions), said(actions)) == ([0], [])


def test_an_abort_lets_a_refused_chunk_go():
    outgoing = Outgoing(num_blocks=2, num_slots=1)
    outgoing.send(0)
    outgoing.lane.handle(Nack(seq=0))
    actions = outgoing.lane.handle(Abort(transfer_id=b"one", reason="cancelled"))
    assert sorted(blocks_done(actions)) == [0, 1]
    assert outgoing.ends == ["cancelled"]


@pytest.mark.parametrize("message", [Ack(seq=0), Nack(seq=0), Ack(seq=9), Nack(seq=9)])
@pytest.mark.parametrize("granted", [False, True])
def test_an_answer_to_what_was_not_sent_ends_the_lane(message, granted):
    outgoing = Outgoing()
    if granted:
        outgoing.lane.handle(Grant(seq=0))
    with pytest.raises(LaneProtocolError):
        outgoing.lane.handle(message)


def test_a_second_nack_of_the_same_blocks_ends_the_lane():
    outgoing = Outgoing(num_blocks=1)
    outgoing.send(0)
    outgoing.lane.handle(Nack(seq=0))
    outgoing.send(1)
    with pytest.raises(LaneProtocolError):
        outgoing.lane.handle(Nack(seq=1))


def test_a_nack_that_is_repeated_ends_the_lane():
    outgoing = Outgoing(num_blocks=1)
    outgoing.send(0)
    outgoing.lane.handle(Nack(seq=0))
    with pytest.raises(LaneProtocolError):
        outgoing.lane.handle(Nack(seq=0))


def test_a_grant_that_was_not_asked_for_ends_the_lane():
    outgoing = Outgoing(num_blocks=1)
    with pytest.raises(LaneProtocolError):
        outgoing.lane.handle(Grant(seq=1))


def test_a_grant_that_crosses_the_senders_abort_is_still_completed():
    outgoing = Outgoing(num_blocks=1)
    outgoing.lane.abort(outgoing.transfer, "cancelled")
    assert said(outgoing.send(0)) == [Sent(seq=0, digest=7)]
    assert blocks_done(outgoing.lane.handle(Ack(seq=0))) == [0]


def test_a_grant_after_the_receivers_abort_ends_the_lane():
    outgoing = Outgoing(num_blocks=1)
    actions = outgoing.lane.handle(Abort(transfer_id=b"one", reason="cancelled"))
    assert blocks_done(actions) == [0]
    with pytest.raises(LaneProtocolError):
        outgoing.lane.handle(Grant(seq=0))


def test_two_open_transfers_with_one_id_are_refused():
    outgoing = Outgoing()
    with pytest.raises(LaneProtocolError):
        outgoing.begin(b"one", num_blocks=1)
    outgoing.lane.abort(outgoing.transfer, "cancelled")
    outgoing.begin(b"one", num_blocks=1)


@pytest.mark.parametrize("is_granted", [True, False])
def test_an_announced_chunk_that_nobody_acknowledges_is_overdue(is_granted):
    outgoing = Outgoing()
    if is_granted:
        outgoing.send(0)
    # Its time begins when the watchdog first sees it.
    assert not outgoing.lane.overdue(10)
    assert not outgoing.lane.overdue(13.5)
    assert outgoing.lane.overdue(13.6)


def test_a_lane_that_is_gone_ends_transfers_and_lets_every_block_go():
    outgoing = Outgoing(num_blocks=3, num_slots=2)
    outgoing.send(0)
    assert sorted(blocks_done(outgoing.lane.close("lane lost"))) == [0, 1, 2]
    assert outgoing.ends == ["lane lost"]


def test_transfers_take_turns_chunk_by_chunk():
    outgoing = Outgoing(num_blocks=6, num_slots=3)
    short = outgoing.begin(b"short", num_blocks=1)
    assert outgoing.lane.offer(short, first_block=0, num_blocks=1) == []
    announced = []
    for seq in range(3):
        shipped = said(outgoing.send(seq))
        announced += [message for message in shipped if isinstance(message, Ready)]
        announced += said(outgoing.lane.handle(Ack(seq=seq)))
    # Chunks 0 and 1 of the long one were announced before the short one came.
    assert [ready.transfer_id for ready in announced] == [b"one", b"short", b"one"]


# The wire


@pytest.mark.parametrize(
    "message",
    [Grant(seq=3), Ack(seq=2**63), Nack(seq=5), Committed(transfer_id=b"t")],
)
def test_a_receivers_message_survives_the_wire(message):
    assert receiver_message_from_pb(receiver_message_to_pb(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        READY,
        Sent(seq=3, digest=2**64 - 1),
        Commit(transfer_id=b"t", num_blocks=2, first_tokens=(FIRST,)),
        Abort(transfer_id=b"t", reason="why"),
    ],
)
def test_a_senders_message_survives_the_wire(message):
    assert sender_message_from_pb(sender_message_to_pb(message)) == message
