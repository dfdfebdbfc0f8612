"""Closed-loop load as one line of medians: so many requests at a time, all of one length.

run --bench/driver.py--> Summary --report--> a line

For bench/latency.py; disagg bench run measures everything else. All requests must be served: a
refusal is an error.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.driver import drive_closed
from bench.prompts import with_prompts
from bench.records import OK, RequestRecord
from bench.targets import Target
from bench.workload import Arrival, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request, in seconds."""

    ttft_s: float
    tpot_s: float
    handoff_gap_s: float | None
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Medians of a run in milliseconds, and its rate."""

    num_requests: int
    ttft_ms: float
    tpot_ms: float
    handoff_gap_ms: float | None
    tokens_per_s: float


async def run(
    target: Target,
    *,
    num_input: int,
    num_output: int,
    concurrency: int,
    num_requests: int,
    rng: random.Random,
) -> Summary:
    """num_requests requests, concurrency at a time. Raises RuntimeError where one is not served."""
    arrival = Arrival(at_s=0.0, num_input=num_input, num_output=num_output)
    workload = Workload(name="", arrivals=(arrival,) * num_requests)
    requests = with_prompts(workload, seed=rng.getrandbits(32), vocab=await target.vocab())
    driven = await drive_closed(target, requests, concurrency=concurrency)
    return summarise([_sample(record) for record in driven.records], driven.wall_s)


def summarise(samples: Sequence[Sample], wall_s: float) -> Summary:
    gaps = [sample.handoff_gap_s for sample in samples if sample.handoff_gap_s is not None]
    return Summary(
        num_requests=len(samples),
        ttft_ms=1e3 * statistics.median(sample.ttft_s for sample in samples),
        tpot_ms=1e3 * statistics.median(sample.tpot_s for sample in samples),
        handoff_gap_ms=1e3 * statistics.median(gaps) if gaps else None,
        tokens_per_s=sum(sample.num_tokens for sample in samples) / wall_s,
    )


def report(name: str, summary: Summary) -> None:
    gap = "" if summary.handoff_gap_ms is None else f"{summary.handoff_gap_ms:6.1f} ms"
    print(
        f"{name:12} n={summary.num_requests:3}"
        f" | TTFT p50 {summary.ttft_ms:7.1f} ms"
        f" | TPOT p50 {summary.tpot_ms:6.1f} ms"
        f" | token 1 to 2 p50 {gap:9}"
        f" | {summary.tokens_per_s:6.1f} output tok/s",
        flush=True,
    )


def _sample(record: RequestRecord) -> Sample:
    if record.outcome != OK or record.ttft_s is None:
        raise RuntimeError(f"request {record.index} {record.outcome}: {record.error}")
    return Sample(
        ttft_s=record.ttft_s,
        tpot_s=record.tpot_s or 0.0,
        handoff_gap_s=record.handoff_gap_s,
        num_tokens=record.num_generated,
    )
