"""The step loop: one thread that plans, computes and tells, step after step.

    event loop: async with engine.run(spec, lease) as run: async for progress in run
                    | submit / abort (commands)            ^ one call_soon per step
    engine thread:  commands -> scheduler.plan -> executor.execute -> scheduler.apply

The engine holds its own claims on a running sequence's blocks: it writes what is not computed and
reads what is, and lets go between two steps. So a lease may be released at any time; its blocks
come free when the engine (and any lane) is done with them.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from engine.executor import Executor
from engine.scheduler import Progress, Running, ScheduledStep, Scheduler
from engine.sequence import GenerationSpec
from kvtransfer.blocks import BlockPool, Lease, LeaseReleased

log = logging.getLogger(__name__)


class StepFailed(Exception):
    """The executor failed; what it was computing is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A look at the engine from any thread. step_age_s is None between steps."""

    num_queued_tokens: int
    num_steps: int
    step_age_s: float | None


class Run:
    """One sequence's progress, step by step, until it has left the engine."""

    def __init__(self, key: int) -> None:
        self.key = key
        self._events: asyncio.Queue[Progress | StepFailed] = asyncio.Queue()

    def put(self, event: Progress | StepFailed) -> None:
        self._events.put_nowait(event)

    async def next(self) -> list[Progress]:
        """All progress since the last call, at least one. Raises StepFailed."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        for event in events:
            if isinstance(event, StepFailed):
                raise event
        return [event for event in events if isinstance(event, Progress)]


@dataclass(slots=True)
class _Held:
    """The engine's claims on a running sequence: blocks before num_sealed are read, others are
    written."""

    request_id: str
    lease: Lease
    writer: str
    num_sealed: int = 0


class Engine:
    """Owner of the engine thread, the scheduler and the executor. start and stop on the loop.

    on_crash is called on the loop if the thread ends by a fault of ours: every run has failed then
    and none will start.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        scheduler: Scheduler,
        pool: BlockPool,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor = executor
        self._on_crash = on_crash
        self._scheduler = scheduler
        self._pool = pool
        self._block_size = executor.layout.block_size
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._stopping = False
        self._held: dict[int, _Held] = {}
        self._runs: dict[int, Run] = {}
        self._next_key = 0
        self._num_steps = 0
        self._num_queued_tokens = 0
        self._step_started: float | None = None
        # Time in execute, and between two executes while there is work.
        self._compute_s = 0.0
        self._overhead_s = 0.0
        self._num_gaps = 0
        self._step_ended: float | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> Coroutine[Any, Any, None]:
        """Ends the thread after the step in progress; await the result for that."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        return asyncio.to_thread(self._thread.join)

    def status(self) -> EngineStatus:
        started = self._step_started
        return EngineStatus(
            num_queued_tokens=self._num_queued_tokens,
            num_steps=self._num_steps,
            step_age_s=None if started is None else time.monotonic() - started,
        )

    @asynccontextmanager
    async def run(
        self,
        spec: GenerationSpec,
        lease: Lease,
        *,
        token_ids: tuple[int, ...] | None = None,
        num_computed: int = 0,
        max_new_tokens: int | None = None,
    ) -> AsyncIterator[Run]:
        """Computes spec in the lease's blocks, from num_computed tokens whose KV is there.

        token_ids (default: the spec's) may hold tokens that another node has drawn. Leaving the
        block takes the sequence out of the engine; release the lease only after that.
        """
        self._next_key += 1
        sequence = Running(
            key=self._next_key,
            spec=spec,
            block_table=lease.block_ids,
            token_ids=list(token_ids or spec.token_ids),
            num_computed=num_computed,
            max_new_tokens=max_new_tokens or spec.stop.max_tokens,
        )
        run = self._runs[sequence.key] = Run(sequence.key)
        self._command(lambda: self._add(sequence, lease))
        try:
            yield run
        finally:
            del self._runs[run.key]
            self._command(lambda: self._remove(run.key))

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _main(self) -> None:
        assert self._loop is not None
        try:
            self._run_steps()
            log.info(
                "engine stopped steps=%d compute_s=%.3f overhead_ms_per_step=%.3f",
                self._num_steps,
                self._compute_s,
                1e3 * self._overhead_s / max(1, self._num_gaps),
            )
        except Exception as error:
            log.critical("engine thread crashed", exc_info=True)
            failure = StepFailed(f"engine crashed: {type(error).__name__}")
            self._tell([(key, failure) for key in list(self._held)])
            self._loop.call_soon_threadsafe(self._on_crash)

    def _run_steps(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._stopping or len(self._scheduler)):
                    self._step_ended = None
                    self._wake.wait()
                if self._stopping:
                    return
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            step = self._scheduler.plan()
            if step is not None:
                self._step(step)
            self._num_queued_tokens = self._scheduler.num_queued_tokens

    def _step(self, step: ScheduledStep) -> None:
        started = self._step_started = time.monotonic()
        if self._step_ended is not None:
            self._overhead_s += started - self._step_ended
            self._num_gaps += 1
        try:
            result = self._executor.execute(step.plan)
        except Exception as error:
            requests = [self._held[key].request_id for key in step.keys]
            log.exception("step failed requests=%s", requests)
            for key in step.keys:
                self._remove(key)
                self._tell([(key, StepFailed(f"{type(error).__name__}: {error}"))])
            return
        finally:
            self._step_started = None
            self._step_ended = time.monotonic()
            self._compute_s += self._step_ended - started
            self._num_steps += 1
        progress = self._scheduler.apply(step, result)
        for event in progress:
            self._seal(event)
        self._tell([(event.key, event) for event in progress])

    def _add(self, sequence: Running, lease: Lease) -> None:
        held = _Held(sequence.spec.request_id, lease, writer=f"engine {sequence.key}")
        held.num_sealed = sequence.num_computed // self._block_size
        computed, rest = lease.block_ids[: held.num_sealed], lease.block_ids[held.num_sealed :]
        try:
            self._pool.begin_write(lease, rest, writer=held.writer)
        except LeaseReleased:
            return
        try:
            self._pool.begin_read(lease, computed)
        except LeaseReleased:
            self._pool.end_write(rest, writer=held.writer)
            return
        self._held[sequence.key] = held
        self._scheduler.add(sequence)

    def _remove(self, key: int) -> None:
        self._scheduler.remove(key)
        held = self._held.pop(key, None)
        if held is not None:
            self._pool.end_write(held.lease.block_ids[held.num_sealed :], writer=held.writer)
            self._pool.end_read(held.lease.block_ids[: held.num_sealed])

    def _seal(self, event: Progress) -> None:
        """Full blocks go from written to read; a sequence that left lets go of all."""
        if event.left:
            self._remove(event.key)
            return
        held = self._held[event.key]
        num_full = event.num_computed // self._block_size
        block_ids = held.lease.block_ids[held.num_sealed : num_full]
        if not block_ids:
            return
        held.num_sealed = num_full
        self._pool.end_write(block_ids, writer=held.writer, then_read=True)

    def _tell(self, events: list[tuple[int, Progress | StepFailed]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[tuple[int, Progress | StepFailed]]) -> None:
        for key, event in events:
            run = self._runs.get(key)
            if run is not None:
                run.put(event)
