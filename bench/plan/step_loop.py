r"""A node's step loop in simulated time: the engine's loop over the real scheduler and claims.

    add --> commands -> grow -> plan -> (the step's predicted time) -> apply -> tell the job
                            \-> leap: the next steps are alike, until somebody touches the node

A step of decode rows alone, none of which ends or stalls, is followed by steps that only differ in
context: they are leapt over at once (bench/plan/leap.py) and caught up with when somebody looks.
Records are the same with and without leaps, which a test holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.plan.clock import Clock, Event
from bench.plan.leap import Leap, plan_leap
from engine.claims import Claims
from engine.cost_model import CostProfile
from engine.executor import StepPlan, StepResult
from engine.growth import grow
from engine.scheduler import Progress, Running, ScheduledStep, Scheduler
from kvtransfer.blocks import BlockPool, Lease

# The token that every draw gives: nothing depends on which one it is.
MADE_UP_TOKEN = 0


class Job(Protocol):
    """Who started a sequence, told of what becomes of it."""

    def progressed(self, progress: Progress) -> None:
        """A step that just ended computed some of it."""

    def drew(self, times_s: Sequence[float]) -> None:
        """A token at each of these times, none of which was the last."""

    def preempted(self) -> None:
        """It left, and its blocks are free."""


@dataclass(slots=True)
class LoopCounts:
    num_steps: int = 0
    busy_ms: float = 0.0
    num_preempted: int = 0


class StepLoop:
    """Sequences of one node. rank orders its steps among those of other nodes at one time."""

    def __init__(
        self,
        clock: Clock,
        *,
        rank: int,
        profile: CostProfile,
        step_budget_ms: float,
        block_size: int,
        pool: BlockPool,
        claims: Claims,
        step_overhead_ms: float,
        may_leap: bool = True,
    ) -> None:
        self.counts = LoopCounts()
        self.num_decoding = 0
        self.decode_context = 0
        self._clock = clock
        self._rank = rank
        self._profile = profile
        self._scheduler = Scheduler(
            profile=profile, step_budget_ms=step_budget_ms, block_size=block_size
        )
        self._block_size = block_size
        self._pool = pool
        self._claims = claims
        self._overhead_s = step_overhead_ms / 1e3
        self._may_leap = may_leap
        self._commands: list[tuple[Running, Lease]] = []
        self._jobs: dict[int, Job] = {}
        self._sequences: dict[int, Running] = {}
        # What happens next here; None: nothing, until somebody wakes it.
        self._event: Event | None = None
        self._leap: Leap | None = None

    def add(self, sequence: Running, lease: Lease, job: Job) -> None:
        self.touch()
        self._jobs[sequence.key] = job
        self._commands.append((sequence, lease))
        self.wake()

    def wake(self) -> None:
        """Something came, or blocks are free."""
        if self._event is None and (self._commands or len(self._scheduler)):
            self._schedule(self._clock.now_s, self._next)

    def touch(self) -> None:
        """Before the node's blocks or sequences change: ends a leap with the step in progress."""
        self.catch_up()
        leap = self._leap
        if leap is None or not leap.cut(self._clock.now_s):
            return
        assert self._event is not None
        self._event.cancel()
        if leap.is_over:
            self._leap = None
            self._schedule(leap.next_start_s, self._next)
        else:
            self._schedule(leap.end_s, self._end_leap)

    def catch_up(self) -> None:
        """Before somebody looks: what the leap has done until now."""
        leap = self._leap
        if leap is None:
            return
        times_s, step_ms = leap.catch_up(self._clock.now_s, claims=self._claims)
        self.num_decoding, self.decode_context = leap.num_rows, leap.context
        if times_s:
            self.counts.num_steps += len(times_s)
            self.counts.busy_ms += step_ms
            for sequence in leap.sequences:
                self._jobs[sequence.key].drew(times_s)

    def _schedule(self, at_s: float, callback: Callable[[], None]) -> None:
        self._event = self._clock.at(at_s, callback, rank=self._rank)

    def _next(self) -> None:
        commands, self._commands = self._commands, []
        for sequence, lease in commands:
            is_added = self._claims.add(sequence, lease, copy_from=None)
            assert is_added
            self._scheduler.add(sequence)
            self._sequences[sequence.key] = sequence
        for victim in grow(self._scheduler, self._claims):
            self.counts.num_preempted += 1
            del self._sequences[victim.key]
            self._jobs.pop(victim.key).preempted()
        step = self._scheduler.plan()
        if step is None:
            self._event = None
            if not len(self._scheduler):
                self.num_decoding = self.decode_context = 0
            return
        if not (self._may_leap and self._begin_leap(step)):
            self._begin(step)

    def _begin(self, step: ScheduledStep) -> None:
        step_ms = self._profile.predict_ms(step.shape)
        self.num_decoding = step.shape.num_decode_rows
        self.decode_context = step.shape.decode_context
        self._schedule(self._clock.now_s + step_ms / 1e3, lambda: self._end(step, step_ms))

    def _end(self, step: ScheduledStep, step_ms: float) -> None:
        self.counts.num_steps += 1
        self.counts.busy_ms += step_ms
        self._schedule(self._clock.now_s + self._overhead_s, self._next)
        progress = self._scheduler.apply(step, _made_up(step.plan))
        for event in progress:
            if event.left:
                self._claims.drop(event.key)
                del self._sequences[event.key]
            else:
                self._claims.seal(event.key, num_computed=event.num_computed)
        for event in progress:
            job = self._jobs.pop(event.key) if event.left else self._jobs[event.key]
            job.progressed(event)

    def _begin_leap(self, step: ScheduledStep) -> bool:
        if step.shape.num_prefill_tokens or len(step.keys) < len(self._scheduler):
            return False
        self._leap = plan_leap(
            [self._sequences[key] for key in step.keys],
            shape=step.shape,
            profile=self._profile,
            block_size=self._block_size,
            num_available=self._pool.counts().available,
            start_s=self._clock.now_s,
            overhead_s=self._overhead_s,
        )
        if self._leap is None:
            return False
        self.num_decoding, self.decode_context = self._leap.num_rows, self._leap.context
        self._schedule(self._leap.end_s, self._end_leap)
        return True

    def _end_leap(self) -> None:
        self.catch_up()
        self._leap = None
        self._schedule(self._clock.now_s + self._overhead_s, self._next)


def _made_up(plan: StepPlan) -> StepResult:
    return StepResult(
        token_ids=tuple(None if row.draw is None else MADE_UP_TOKEN for row in plan.rows)
    )
