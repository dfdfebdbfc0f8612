"""disagg bench interfere: what long prompts do to streams that are being decoded.

    steady streams   short prompt, long answer, one after the other without a pause
    long prompts     one every few seconds, with a short answer, whether the last one is done or not

    InterfereLoad --put_on(target)--> requests labelled steady and long --summarise--> figures

A gap counts if it ended while all streams ran. Gaps are between chunks, as a client sees them;
tokens per chunk tells whether merged chunks hide any. The load is that of published comparisons
with other servers: 4 streams of 64 in and 256 out, 1,500 tokens every 2 s.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.records import RequestRecord
from bench.verdict import Figure

STEADY, LONG = "steady", "long"
# Between the starts of streams, so that their prompts do not come as one.
_STAGGER_S = 0.05

FIGURES = (
    Figure(name="itl_p50_ms", title="ITL p50"),
    Figure(name="itl_p99_ms", title="ITL p99"),
    Figure(name="itl_p999_ms", title="ITL p99.9"),
    Figure(name="itl_max_ms", title="ITL max"),
    Figure(name="gaps_over_50ms", title="gaps > 50 ms", unit="", is_difference=True),
    Figure(name="gaps_over_100ms", title="gaps > 100 ms", unit="", is_difference=True),
    Figure(name="short_ttft_p50_ms", title="short TTFT p50"),
    Figure(name="long_ttft_p50_ms", title="long TTFT p50"),
    Figure(name="steady_tok_s", title="steady", unit="tok/s", is_lower_better=False),
    Figure(name="tokens_per_chunk", title="tokens per chunk", unit="", is_difference=True),
    Figure(name="num_failed", title="not answered", unit="requests", is_difference=True),
)

# Sends one request and returns when it has ended: label, prompt tokens, tokens asked for.
Ask = Callable[[str, int, int], Awaitable[RequestRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfereLoad:
    """num_long_input 0: no long prompts, the control."""

    num_streams: int = 4
    num_input: int = 64
    num_output: int = 256
    num_long_input: int = 1500
    num_long_output: int = 8
    every_s: float = 2.0
    duration_s: float = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Requests that began within duration_s, and how long it took until the last had ended."""

    records: Sequence[RequestRecord]
    duration_s: float
    wall_s: float


async def put_on(ask: Ask, load: InterfereLoad) -> Observed:
    """Lasts duration_s and until what began in it has ended."""
    started = time.monotonic()
    ends = started + load.duration_s
    records: list[RequestRecord] = []

    async def stream(index: int) -> None:
        await asyncio.sleep(index * _STAGGER_S)
        while time.monotonic() < ends:
            records.append(await ask(STEADY, load.num_input, load.num_output))

    async def send_long() -> None:
        records.append(await ask(LONG, load.num_long_input, load.num_long_output))

    async def arrive(tasks: asyncio.TaskGroup) -> None:
        at = started
        while (at := at + load.every_s) < ends:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.create_task(send_long())

    async with asyncio.TaskGroup() as tasks:
        for index in range(load.num_streams):
            tasks.create_task(stream(index))
        if load.num_long_input:
            tasks.create_task(arrive(tasks))
    return Observed(records=records, duration_s=load.duration_s, wall_s=time.monotonic() - started)


def summarise(observed: Observed) -> dict[str, float | None]:
    """Values of FIGURES; None where no request has one."""
    steady = [record for record in observed.records if record.label == STEADY]
    gaps_ms = [gap for record in steady for gap in chunk_gaps_ms(record, until=observed.duration_s)]
    num_tokens = sum(record.num_generated for record in steady)
    num_chunks = sum(len(record.chunks) for record in steady)
    return {
        "itl_p50_ms": _percentile(gaps_ms, 50),
        "itl_p99_ms": _percentile(gaps_ms, 99),
        "itl_p999_ms": _percentile(gaps_ms, 99.9),
        "itl_max_ms": max(gaps_ms, default=None),
        "gaps_over_50ms": sum(gap > 50 for gap in gaps_ms),
        "gaps_over_100ms": sum(gap > 100 for gap in gaps_ms),
        "short_ttft_p50_ms": _ttft_p50_ms(observed.records, STEADY),
        "long_ttft_p50_ms": _ttft_p50_ms(observed.records, LONG),
        "steady_tok_s": num_tokens / observed.wall_s,
        "tokens_per_chunk": num_tokens / num_chunks if num_chunks else None,
        "num_failed": sum(record.outcome != "ok" for record in observed.records),
    }


def chunk_gaps_ms(record: RequestRecord, *, until: float) -> list[float]:
    """Between chunks that came before until, in seconds since the run's start."""
    times = [at for at, _ in record.chunks if at <= until]
    return [1e3 * (b - a) for a, b in pairwise(times)]


def _ttft_p50_ms(records: Sequence[RequestRecord], label: str) -> float | None:
    found = [r.ttft_s for r in records if r.label == label and r.ttft_s is not None]
    return 1e3 * statistics.median(found) if found else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
