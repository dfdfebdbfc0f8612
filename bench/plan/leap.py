"""Decode steps that only differ in context, as one stretch of simulated time.

    starts_s[i] --step i--> ends_s[i] --overhead--> starts_s[i + 1] ...

Ends before the first sequence would end, and before blocks could run out. catch_up does to the
sequences and the claims what the steps until then have done; cut leaves the step in progress as the
last one. Times are added up exactly as single steps would.
"""

from bisect import bisect_right
from collections.abc import Sequence

from engine.claims import Claims
from engine.cost_model import CostProfile, StepShape
from engine.scheduler import Running

# Ahead of that many steps nothing is worth planning: a leap is cut when anything comes.
MAX_STEPS = 64
# A leap of one step is a step.
MIN_STEPS = 2


class Leap:
    """Steps of these sequences, one token each. Made by plan_leap."""

    def __init__(
        self,
        sequences: Sequence[Running],
        *,
        context: int,
        block_size: int,
        starts_s: list[float],
        ends_s: list[float],
        steps_ms: list[float],
    ) -> None:
        self.sequences = sequences
        self.context = context
        self._block_size = block_size
        self._starts_s = starts_s
        self._ends_s = ends_s
        self._steps_ms = steps_ms
        self._first_context = context
        self._num_ended = 0
        self._num_started = 1

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    @property
    def end_s(self) -> float:
        return self._ends_s[-1]

    @property
    def is_over(self) -> bool:
        return self._num_ended == len(self._ends_s)

    @property
    def next_start_s(self) -> float:
        """When the step after the last one starts."""
        return self._starts_s[len(self._ends_s)]

    def catch_up(self, now_s: float, *, claims: Claims) -> tuple[list[float], float]:
        """Until now; returns the times of the steps that have ended since the last time, and how
        many milliseconds they took together."""
        first = self._num_ended
        num_ended = bisect_right(self._ends_s, now_s, first)
        num_started = min(len(self._ends_s), bisect_right(self._starts_s, now_s, first))
        num_new, num_grown = num_ended - first, num_started - self._num_started
        if num_new or num_grown > 0:
            for sequence in self.sequences:
                self._advance(sequence, num_new, num_started - num_ended, claims)
        self._num_ended, self._num_started = num_ended, num_started
        self.context = self._first_context + (num_started - 1) * self.num_rows
        return self._ends_s[first:num_ended], sum(self._steps_ms[first:num_ended])

    def cut(self, now_s: float) -> bool:
        """Leaves out the steps that have not started, once caught up; False if there are none."""
        if self._num_started == len(self._ends_s):
            return False
        del self._ends_s[self._num_started :]
        return True

    def _advance(self, sequence: Running, num_new: int, num_running: int, claims: Claims) -> None:
        sequence.token_ids.extend([0] * num_new)
        sequence.num_computed += num_new
        sequence.num_drawn += num_new
        # A step's growth comes before it: in between two, the next one's has yet to come.
        num_needed = len(sequence.token_ids) - 1 + num_running
        while self._block_size * len(sequence.block_table) < num_needed:
            claims.grow(sequence.key)
        if num_new:
            claims.seal(sequence.key, num_computed=sequence.num_computed)


def plan_leap(
    sequences: Sequence[Running],
    *,
    shape: StepShape,
    profile: CostProfile,
    block_size: int,
    num_available: int,
    start_s: float,
    overhead_s: float,
) -> Leap | None:
    """The longest leap from a step of this shape that starts now; None where it is not worth it."""
    num_steps = min(MAX_STEPS, min(_num_left(sequence) for sequence in sequences) - 1)
    while num_steps >= MIN_STEPS:
        if sum(_num_grown(one, num_steps, block_size) for one in sequences) <= num_available:
            break
        num_steps //= 2
    if num_steps < MIN_STEPS:
        return None
    starts_s, ends_s, steps_ms = [start_s], [], []
    for index in range(num_steps):
        context = shape.decode_context + index * len(sequences)
        step_ms = profile.predict_ms(
            StepShape(num_decode_rows=len(sequences), decode_context=context)
        )
        steps_ms.append(step_ms)
        ends_s.append(starts_s[-1] + step_ms / 1e3)
        starts_s.append(ends_s[-1] + overhead_s)
    return Leap(
        sequences,
        context=shape.decode_context,
        block_size=block_size,
        starts_s=starts_s,
        ends_s=ends_s,
        steps_ms=steps_ms,
    )


def _num_left(sequence: Running) -> int:
    """Tokens until it leaves."""
    return min(
        sequence.max_new_tokens - sequence.num_drawn,
        sequence.spec.max_num_tokens - len(sequence.token_ids),
    )


def _num_grown(sequence: Running, num_steps: int, block_size: int) -> int:
    """Blocks that it takes so that the last of so many steps has a place for its token."""
    num_tokens = len(sequence.token_ids) + num_steps - 1
    return max(0, -(-num_tokens // block_size) - len(sequence.block_table))
