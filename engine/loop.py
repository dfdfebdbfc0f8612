"""The step loop: one thread that plans, computes and tells, step after step.

    event loop: async with engine.run() as run: run.start(spec, lease); await run.next()
                    | add / remove (commands)            ^ one call_soon per step
    engine thread:  commands -> grow -> scheduler.plan -> executor.execute -> scheduler.apply

The engine has its own claims on a running sequence's blocks (engine/claims.py), and lets go between
two steps. So a lease may be released at any time; its blocks come free when the engine (and any
lane) is done with them.

A sequence grows block by block (engine/growth.py). One that is preempted leaves with Preempted, and
goes on elsewhere or later.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from engine.claims import Claims
from engine.cost_model import CostProfile
from engine.executor import Executor
from engine.growth import grow
from engine.run import Preempted, Run, RunEvent, StepFailed
from engine.scheduler import Running, ScheduledStep, Scheduler
from kvtransfer.blocks import BlockPool, Lease
from kvtransfer.memory import KvMemory
from kvtransfer.prefix import PrefixChain

log = logging.getLogger(__name__)

# Blocks that come free wake the engine; this is for none that are overlooked.
BLOCKS_WAIT_S = 1.0


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
        self._claims = Claims(pool, memory)
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._stopping = False
        self._runs: dict[int, Run] = {}
        self._next_key = 0
        self._num_steps = 0
        self._num_queued_tokens = 0
        self._step_started: float | None = None
        self._step_predicted_s = 0.0
        self._num_decoding = 0
        self._decode_context = 0
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
        self,
        sequence: Running,
        lease: Lease,
        run: Run,
        *,
        copy_from: int | None = None,
        chain: PrefixChain | None = None,
    ) -> None:
        self._runs[sequence.key] = run
        self._command(lambda: self._add(sequence, lease, copy_from, chain))

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
            self._tell([(key, failure) for key in self._claims.held_keys()])
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
        self._blocks_freed = False
        for victim in grow(self._scheduler, self._claims):
            request_id = victim.spec.request_id
            log.info(
                "preempted request=%r tokens=%d",
                request_id,
                len(victim.token_ids),
                extra={"request": request_id},
            )
            self._tell([(victim.key, Preempted(f"{request_id} gave its KV blocks to an older"))])

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
            requests = [self._claims.request_id(key) for key in step.keys]
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
            self._claims.seal(event.key, num_computed=event.num_computed)
            if event.left:
                self._remove(event.key)
        self._tell([(event.key, event) for event in progress])

    def _add(
        self, sequence: Running, lease: Lease, copy_from: int | None, chain: PrefixChain | None
    ) -> None:
        if self._claims.add(sequence, lease, copy_from=copy_from, chain=chain):
            self._scheduler.add(sequence)

    def _remove(self, key: int) -> None:
        self._scheduler.remove(key)
        self._claims.drop(key)

    def _tell(self, events: Sequence[tuple[int, RunEvent]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Sequence[tuple[int, RunEvent]]) -> None:
        for key, event in events:
            run = self._runs.get(key)
            if run is not None:
                run.put(event)
