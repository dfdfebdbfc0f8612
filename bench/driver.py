"""Puts a workload on a target: open loop (when arrivals are due) or closed (so many at a time).

    Prompted --due--> task: target.ask --chunks--> RequestRecord

Open loop: an arrival does not wait for answers, so a server that falls behind shows in TTFT, which
counts from when the request was due. Closed loop: an overloaded server slows down those who ask.
What has not ended drain_s after the last request was sent is cancelled and recorded as unfinished.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field

from bench.prompts import Prompted
from bench.records import FAILED, OK, UNFINISHED, RequestRecord
from bench.targets import Chunks, Ending, Target

DEFAULT_DRAIN_S = 60.0
# Between making the tasks and the first arrival.
_LEAD_S = 0.05


@dataclass(slots=True, kw_only=True)
class Live:
    """A run in progress, for whoever watches it. in_flight: what has come of each, by index."""

    num_planned: int
    in_flight: dict[int, Chunks] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """All requests of a run by index; wall_s is from its start to the end of the last of them."""

    records: Sequence[RequestRecord]
    wall_s: float


# Runs beside the load, and is cancelled with it.
Watcher = Callable[[Live], Awaitable[None]]


async def drive_open(
    target: Target,
    requests: Sequence[Prompted],
    *,
    drain_s: float = DEFAULT_DRAIN_S,
    watch: Watcher | None = None,
) -> Driven:
    """Sends each request when it is due."""
    run = _Run(target, num_planned=len(requests))
    asking: list[asyncio.Task[None]] = []

    async def send_all() -> None:
        for index, request in enumerate(requests):
            await _sleep_until(run.start_s + request.arrival.at_s)
            task = asyncio.create_task(run.ask(index, request, due_s=request.arrival.at_s))
            asking.append(task)
        if asking:
            await asyncio.wait(asking, timeout=drain_s)

    return await run.finish(send_all(), asking, watch=watch)


async def drive_closed(
    target: Target,
    requests: Sequence[Prompted],
    *,
    concurrency: int,
    duration_s: float | None = None,
    drain_s: float = DEFAULT_DRAIN_S,
    watch: Watcher | None = None,
) -> Driven:
    """Keeps concurrency requests open until there are none left, or duration_s has passed. A
    request is due when it is sent; times of arrival are not used."""
    run = _Run(target, num_planned=len(requests))
    waiting = iter(enumerate(requests))

    async def worker(waiting: Iterator[tuple[int, Prompted]]) -> None:
        for index, request in waiting:
            if duration_s is not None and time.monotonic() - run.start_s >= duration_s:
                return
            await run.ask(index, request)

    async def work() -> None:
        await _sleep_until(run.start_s)
        workers.extend(asyncio.create_task(worker(waiting)) for _ in range(concurrency))
        # One that ends has found nothing left to send.
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait(workers, timeout=duration_s, return_when=first)
        await asyncio.wait(workers, timeout=drain_s)

    workers: list[asyncio.Task[None]] = []
    return await run.finish(work(), workers, watch=watch)


class _Run:
    """Owner of a run's records. start_s is in monotonic seconds, and a little ahead."""

    def __init__(self, target: Target, *, num_planned: int) -> None:
        self.start_s = time.monotonic() + _LEAD_S
        self._target = target
        self._live = Live(num_planned=num_planned)

    async def ask(self, index: int, request: Prompted, *, due_s: float | None = None) -> None:
        """due_s None: now."""
        sent_s = time.monotonic() - self.start_s
        due_s = sent_s if due_s is None else due_s
        chunks: Chunks = []
        self._live.in_flight[index] = chunks
        ending = Ending(outcome=UNFINISHED, error="the run ended before")
        try:
            ending = await self._target.ask(request.prompt, request.arrival.num_output, chunks)
        finally:
            del self._live.in_flight[index]
            record = self._record(index, request, ending, chunks, due_s=due_s, sent_s=sent_s)
            self._live.records.append(record)

    async def finish(
        self,
        work: Coroutine[None, None, None],
        tasks: Sequence[asyncio.Task[None]],
        *,
        watch: Watcher | None,
    ) -> Driven:
        """Waits for work, then ends the tasks that it has left. A fault of a task is raised: it is
        ours, never the server's."""
        watching = asyncio.ensure_future(watch(self._live)) if watch is not None else None
        try:
            await work
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if watching is not None:
                watching.cancel()
                await asyncio.wait([watching])
        wall_s = time.monotonic() - self.start_s
        for task in tasks:
            if not task.cancelled():
                task.result()
        records = sorted(self._live.records, key=lambda record: record.index)
        return Driven(records=records, wall_s=wall_s)

    def _record(
        self,
        index: int,
        request: Prompted,
        ending: Ending,
        chunks: Chunks,
        *,
        due_s: float,
        sent_s: float,
    ) -> RequestRecord:
        arrival = request.arrival
        num_generated = sum(count for _, count in chunks)
        outcome, error = ending.outcome, ending.error
        if outcome == OK and num_generated != arrival.num_output:
            outcome, error = FAILED, f"{num_generated} tokens came of {arrival.num_output}"
        return RequestRecord(
            index=index,
            offered_s=due_s,
            sent_s=sent_s,
            num_input=ending.num_prompt_tokens or arrival.num_input,
            num_output=arrival.num_output,
            label=arrival.label,
            chunks=tuple((at_s - self.start_s, count) for at_s, count in chunks),
            ended_s=None if outcome == UNFINISHED else time.monotonic() - self.start_s,
            outcome=outcome,
            error=error,
            queue_s=ending.queue_s,
            transfer_s=ending.transfer_s,
            handoff_gap_s=ending.handoff_gap_s,
            served_as=ending.served_as,
            prefill_node=ending.prefill_node,
            decode_node=ending.decode_node,
            num_cached=ending.num_cached,
        )


async def _sleep_until(at_s: float) -> None:
    left_s = at_s - time.monotonic()
    if left_s > 0:
        await asyncio.sleep(left_s)
