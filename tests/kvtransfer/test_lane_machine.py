"""Both ends of a lane over block pools and real memory, through any order of events that hypothesis
thinks of: what must hold after every step, and after everything has come to its end.

The world is in lane_world.py.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtransfer.layout import KvLayout
from tests.kvtransfer.lane_world import (
    FIRST,
    LAYOUT,
    NUM_BLOCKS,
    NUM_SLOTS,
    OTHER_SHAPE,
    WORDS_PER_TOKEN,
    LaneWorld,
    Moves,
    Request,
)

TOKENS = st.integers(1, 7)
SIDES = st.sampled_from(["sender", "receiver", "both"])
SECONDS = st.sampled_from([0.1, 3.0])
# Per move: nothing is seen in a world where no transfer gets anywhere.
INCIDENT_RATE = 0.08


class LaneMachine(RuleBasedStateMachine):
    @initialize(receiving=st.sampled_from([LAYOUT, OTHER_SHAPE]))
    def begin(self, receiving: KvLayout) -> None:
        self.world = LaneWorld(receiving)

    @rule(num_tokens=TOKENS, num_cached_blocks=st.integers(0, 3))
    def start(self, num_tokens: int, num_cached_blocks: int) -> None:
        self.world.start(num_tokens, num_cached_blocks=num_cached_blocks)

    @rule(data=st.data(), is_noisy=st.booleans())
    def next_move(self, data: st.DataObject, is_noisy: bool) -> None:
        """One move; on a noisy plane some bytes arrive damaged."""
        moves = self.moves(is_noisy=is_noisy)
        if moves:
            moves[data.draw(st.sampled_from(list(moves)))]()

    @rule(seed=st.integers(0, 2**32), count=st.integers(20, 80), is_noisy=st.booleans())
    def go_on(self, seed: int, count: int, is_noisy: bool) -> None:
        """Many random moves and now and then an incident: hypothesis by itself seldom gets as far
        as a COMMIT."""
        draw = random.Random(seed)
        for _ in range(count):
            moves = self.moves(is_noisy=is_noisy)
            if moves and draw.random() > INCIDENT_RATE:
                draw.choice(list(moves.values()))()
            else:
                self.incident(draw)
            self.check()

    @rule()
    def hear_everything(self) -> None:
        """What one side says reaches the other at once."""
        while heard := [act for name, act in self.world.moves().items() if "hears" in name]:
            heard[0]()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def release_what_has_ended(self, data: st.DataObject) -> None:
        self.world.release(data.draw(st.sampled_from(self.world.requests)))

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), sides=SIDES)
    def abort(self, data: st.DataObject, sides: str) -> None:
        self.abort_on(sides, data.draw(st.sampled_from(self.latest())))

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), sides=SIDES, num_tokens=TOKENS)
    def hand_on(self, data: st.DataObject, sides: str, num_tokens: int) -> None:
        self.hand_on_blocks(data.draw(st.sampled_from(self.latest())), sides, num_tokens)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.world.time_passes(seconds)

    @rule(sides=SIDES)
    def lose_the_lane(self, sides: str) -> None:
        self.lose_on(sides)

    @rule()
    def reconnect(self) -> None:
        self.world.reconnect()

    def incident(self, draw: random.Random) -> None:
        """Mostly one that leaves the lane as it is."""
        kind = draw.choices(
            ["start", "release", "abort", "hand on", "time", "lose", "reconnect"],
            weights=[6, 4, 2, 4, 2, 1, 1 if self.world.lane.is_up else 9],
        )[0]
        sides = draw.choice(["sender", "receiver", "both"])
        num_tokens = draw.randint(1, 7)
        if kind == "start" or not self.world.requests:
            self.world.start(num_tokens, num_cached_blocks=draw.choice((0, 0, 1, 3)))
        elif kind == "release":
            for request in self.world.requests:
                self.world.release(request)
        elif kind == "abort":
            self.abort_on(sides, draw.choice(self.latest()))
        elif kind == "hand on":
            self.hand_on_blocks(draw.choice(self.latest()), sides, num_tokens)
        elif kind == "time":
            self.world.time_passes(draw.choice([0.1, 3.0]))
        elif kind == "lose":
            self.lose_on(sides)
        else:
            self.world.reconnect()

    def moves(self, *, is_noisy: bool) -> Moves:
        return self.world.moves() | (self.world.damage() if is_noisy else {})

    def latest(self) -> list[Request]:
        """They have most to lose."""
        return self.world.requests[-4:]

    def abort_on(self, sides: str, request: Request) -> None:
        if sides != "receiver":
            self.world.abort_sending(request)
        if sides != "sender":
            self.world.abort_receiving(request)

    def hand_on_blocks(self, request: Request, sides: str, num_tokens: int) -> None:
        """Ended and released, whatever is in flight; another request takes the blocks."""
        self.abort_on(sides, request)
        self.world.release(request)
        self.world.start(num_tokens)

    def lose_on(self, sides: str) -> None:
        if sides != "receiver":
            self.world.close_sender(self.world.lane)
        if sides != "sender":
            self.world.close_receiver(self.world.lane)

    @invariant()
    def check(self) -> None:
        for side in (self.world.sending, self.world.receiving):
            counts = side.pool.counts()
            assert counts.free + counts.reserved + counts.writing + counts.sealed == counts.total
            assert counts.writing == len(side.writers)
        for lane in self.world.lanes:
            assert lane.receiver.num_busy_slots <= NUM_SLOTS
        for request in self.world.requests:
            self.check_request(request)

    def check_request(self, request: Request) -> None:
        assert len(request.sent) <= 1
        assert len(request.received) <= 1
        if request.sent == [None]:
            assert request.received == [None]
        if request.is_receive_released:
            return
        words = self.world.receiving.words(request.receive_lease)
        assert set(words) <= request.words_or_none, "another transfer's bytes"
        if request.received == [None]:
            assert request.incoming.first_tokens == (FIRST,)
            for token in range(request.num_tokens):
                is_shipped = token >= request.num_cached_tokens
                assert words.count(request.word(token)) == WORDS_PER_TOKEN * is_shipped

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.finish()
        if self.world.lane.is_up:
            for request in self.world.requests:
                if request.lane is self.world.lane and not request.is_cancelled:
                    assert request.sent in ([None], ["chunk digest differs"]), "it is stuck"
            assert self.world.lane.receiver.num_busy_slots == 0
        for request in self.world.requests:
            self.world.abort_sending(request)
            self.world.abort_receiving(request)
        self.finish()
        # What one side has lost, the other will.
        if not self.world.lane.is_up:
            self.world.reconnect()
        for request in self.world.requests:
            assert (len(request.sent), len(request.received)) == (1, 1)
            self.world.release(request)
        assert len(self.world.inbox) == 0
        for side in (self.world.sending, self.world.receiving):
            assert side.pool.counts().free == NUM_BLOCKS

    def finish(self) -> None:
        """Everything is computed, sent and committed, undamaged."""
        while moves := self.world.moves():
            next(iter(moves.values()))()
            self.check()


def test_a_lane_keeps_its_promises_whatever_happens():
    run_state_machine_as_test(
        LaneMachine,
        settings=settings(
            max_examples=200, stateful_step_count=30, derandomize=True, deadline=None
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_lane_keeps_its_promises_for_long():
    run_state_machine_as_test(
        LaneMachine,
        settings=settings(
            max_examples=4000, stateful_step_count=60, derandomize=True, deadline=None
        ),
    )
