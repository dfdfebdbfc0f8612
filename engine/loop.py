"""The step loop: one thread that plans, computes and tells, step after step.

    event loop: async with engine.run(spec, lease) as run: async for progress in run
                    | submit / abort (commands)            ^ one call_soon per step
    engine thread:  commands -> scheduler.plan -> executor.execute -> scheduler.apply

The engine holds its own claims on a running sequence's blocks: it writes what is not computed and
reads what is, and lets go between two steps. So a lease may be released at any time; its blocks
come free when the engine (and any lane) is done with them.

A sequence grows block by block. When none is free the youngest of the least priority is preempted:
it leaves with Preempted, and goes on elsewhere or later. The oldest never has to leave.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.cost_model import CostProfile
from engine.executor import Executor
from engine.scheduler import Progress, Running, ScheduledStep, Scheduler
from engine.sequence import GenerationSpec
from kvtransfer.blocks import BlockPool, BlocksExhausted, Lease, LeaseReleased
from kvtransfer.memory import KvMemory

log = logging.getLogger(__name__)

# Blocks that come free wake the engine; this is for none that are overlooked.
BLOCKS_WAIT_S = 1.0


class StepFailed(Exception):
    """The executor failed; what it was computing is lost."""


class Preempted(Exception):
    """The sequence's blocks were needed for an older one; what it has generated is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A look at the engine from any thread. step_age_s is None between steps."""

    num_queued_tokens: int
    num_steps: int
    compute_s: float
    step_age_s: float | None
    step_predicted_s: float
    num_decoding: int
    decode_context: int
    profile: CostProfile


class Run:
    """One request's sequences in the engine, and what becomes of them, step by step."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._keys: list[int] = []
        self._events: asyncio.Queue[RunEvent] = asyncio.Queue()
        self._failure: StepFailed | Preempted | None = None

    def start(
        self,
        spec: GenerationSpec,
        lease: Lease,
        *,
        block_ids: Sequence[int] | None = None,
        token_ids: Sequence[int] | None = None,
        num_computed: int = 0,
        max_new_tokens: int | None = None,
        copy_from: int | None = None,
    ) -> int:
        """Computes spec in blocks of the lease, from num_computed tokens whose KV is there.

        block_ids (default: the lease's) are in the order of tokens; full ones that are computed may
        be shared between choices. A choice that goes on from another's prompt has a copy of the
        block that is not full: copy_from. token_ids (default: the spec's) may hold tokens that
        another node has drawn. Returns the key that is in its Progress.
        """
        sequence = Running(
            key=self._engine.next_key(),
            spec=spec,
            block_table=list(lease.block_ids if block_ids is None else block_ids),
            token_ids=list(spec.token_ids if token_ids is None else token_ids),
            num_computed=num_computed,
            max_new_tokens=max_new_tokens or spec.stop.max_tokens,
            arrived_s=time.monotonic() - spec.age_s,
        )
        self._keys.append(sequence.key)
        self._engine.add(sequence, lease, self, copy_from=copy_from)
        return sequence.key

    def put(self, event: "RunEvent") -> None:
        self._events.put_nowait(event)

    async def next(self) -> list[Progress]:
        """All progress since the last call, at least one. Raises StepFailed, Preempted."""
        if self._failure is not None:
            raise self._failure
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        progress = [event for event in events if isinstance(event, Progress)]
        self._failure = next((event for event in events if not isinstance(event, Progress)), None)
        if not progress and self._failure is not None:
            raise self._failure
        return progress

    def close(self) -> None:
        """Takes what still runs out of the engine."""
        for key in self._keys:
            self._engine.remove(key)


RunEvent = Progress | StepFailed | Preempted


@dataclass(slots=True)
class _Held:
    """The engine's claims on a running sequence: blocks of its table before num_sealed are read,
    others are written. grown are leases of the engine's own, for blocks behind the first lease."""

    request_id: str
    lease: Lease
    writer: str
    table: list[int]
    num_sealed: int = 0
    grown: list[Lease] = field(default_factory=list)


class Engine:
    """Owner of the engine thread, the scheduler and the executor. start and stop on the loop.

    on_crash is called on the loop if the thread ends by a fault of ours: every run has failed then
    and none will start. memory is what the executor computes over.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        scheduler: Scheduler,
        pool: BlockPool,
        memory: KvMemory,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor = executor
        self._on_crash = on_crash
        self._scheduler = scheduler
        self._pool = pool
        self._memory = memory
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
        self._step_predicted_s = 0.0
        self._num_decoding = 0
        self._decode_context = 0
        # Of the last sequence that was preempted: its blocks are on their way.
        self._freeing: Lease | None = None
        self._blocks_freed = False
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
            compute_s=self._compute_s,
            step_age_s=None if started is None else time.monotonic() - started,
            step_predicted_s=self._step_predicted_s,
            num_decoding=self._num_decoding,
            decode_context=self._decode_context,
            profile=self._scheduler.profile,
        )

    def blocks_came_free(self) -> None:
        """Any thread: a sequence that waits for a block may go on."""
        with self._wake:
            self._blocks_freed = True
            self._wake.notify()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Run]:
        """A run to start sequences in. Leaving the block takes them out of the engine; release
        their leases only after that."""
        run = Run(self)
        try:
            yield run
        finally:
            run.close()

    def next_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def add(
        self, sequence: Running, lease: Lease, run: Run, *, copy_from: int | None = None
    ) -> None:
        self._runs[sequence.key] = run
        self._command(lambda: self._add(sequence, lease, copy_from))

    def remove(self, key: int) -> None:
        if self._runs.pop(key, None) is not None:
            self._command(lambda: self._remove(key))

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
                    self._num_decoding = self._decode_context = 0
                    self._wake.wait()
                if self._stopping:
                    return
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            self._grow()
            step = self._scheduler.plan()
            if step is not None:
                self._step(step)
            elif len(self._scheduler):
                self._wait_for_blocks()
            self._num_queued_tokens = self._scheduler.num_queued_tokens

    def _grow(self) -> None:
        """A block for each sequence whose next token has no place, as far as there are any."""
        self._blocks_freed = False
        for sequence in self._scheduler.in_need_of_blocks():
            held = self._held.get(sequence.key)
            if held is None:
                continue  # preempted for one before it
            try:
                lease = self._pool.reserve(1)
            except BlocksExhausted:
                self._preempt()
                continue
            self._pool.begin_write(lease, lease.block_ids, writer=held.writer)
            held.grown.append(lease)
            held.table.extend(lease.block_ids)

    def _preempt(self) -> None:
        """Makes one sequence leave, unless one has left whose blocks are not free yet."""
        if self._freeing is not None and self._pool.holds(self._freeing):
            return
        victim = self._scheduler.victim()
        if victim is None:
            return
        held = self._held[victim.key]
        log.info(
            "preempted request=%r tokens=%d",
            held.request_id,
            len(victim.token_ids),
            extra={"request": held.request_id},
        )
        self._freeing = held.lease
        self._remove(victim.key)
        self._tell([(victim.key, Preempted(f"{held.request_id} gave its KV blocks to an older"))])

    def _wait_for_blocks(self) -> None:
        with self._wake:
            self._step_ended = None
            self._wake.wait_for(
                lambda: self._commands or self._stopping or self._blocks_freed, BLOCKS_WAIT_S
            )

    def _step(self, step: ScheduledStep) -> None:
        self._step_predicted_s = self._scheduler.profile.predict_ms(step.shape) / 1e3
        self._num_decoding = step.shape.num_decode_rows
        self._decode_context = step.shape.decode_context
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

    def _add(self, sequence: Running, lease: Lease, copy_from: int | None) -> None:
        table = sequence.block_table
        held = _Held(sequence.spec.request_id, lease, f"engine {sequence.key}", table)
        held.num_sealed = sequence.num_computed // self._block_size
        computed, rest = table[: held.num_sealed], table[held.num_sealed :]
        try:
            self._pool.begin_write(lease, rest, writer=held.writer)
        except LeaseReleased:
            return
        try:
            self._pool.begin_read(lease, computed)
        except LeaseReleased:
            self._pool.end_write(rest, writer=held.writer)
            return
        if copy_from is not None:
            with self._memory.reading([copy_from]) as (block,):
                self._memory.write(rest[:1], block)
        self._held[sequence.key] = held
        self._scheduler.add(sequence)

    def _remove(self, key: int) -> None:
        self._scheduler.remove(key)
        held = self._held.pop(key, None)
        if held is not None:
            self._pool.end_write(held.table[held.num_sealed :], writer=held.writer)
            self._pool.end_read(held.table[: held.num_sealed])
            for lease in held.grown:
                self._pool.release(lease)

    def _seal(self, event: Progress) -> None:
        """Full blocks go from written to read; a sequence that left lets go of all."""
        if event.left:
            self._remove(event.key)
            return
        held = self._held[event.key]
        num_full = event.num_computed // self._block_size
        block_ids = held.table[held.num_sealed : num_full]
        if not block_ids:
            return
        held.num_sealed = num_full
        self._pool.end_write(block_ids, writer=held.writer, then_read=True)

    def _tell(self, events: Sequence[tuple[int, RunEvent]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Sequence[tuple[int, RunEvent]]) -> None:
        for key, event in events:
            run = self._runs.get(key)
            if run is not None:
                run.put(event)
