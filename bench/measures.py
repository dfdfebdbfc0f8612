"""The figures of a run, from its requests: real ones or simulated ones.

TTFT is of every request that got a token; TPOT and E2E are of those that were served whole; gaps
are all that were seen. What was refused or failed has no latency, so it shows in outcomes and in
SLO attainment (bench/slo.py), never as a better percentile. Several tokens in one chunk have no
time between them: tokens_per_chunk tells how many gaps may be hidden so.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.records import OK, OUTCOMES, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Dist:
    """Percentiles, interpolated between the values that occurred."""

    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float
    mean: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """None: no request has the figure. Rates are over wall_s; total counts prompt tokens too."""

    wall_s: float
    num_offered: int
    outcomes: dict[str, int]
    served_as: dict[str, int]
    ttft_ms: Dist | None
    itl_ms: Dist | None
    handoff_gap_ms: Dist | None
    tpot_ms: Dist | None
    e2e_ms: Dist | None
    queue_ms: Dist | None
    transfer_ms: Dist | None
    num_gaps_over_50ms: int
    num_gaps_over_100ms: int
    output_tok_s: float
    total_tok_s: float
    tokens_per_chunk: float | None
    # Of the prompt tokens of served requests.
    cached_share: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(records: Sequence[RequestRecord], *, wall_s: float) -> Measures:
    """wall_s: from the run's start until the last request had ended."""
    served = [record for record in records if record.outcome == OK]
    gaps_ms = [1e3 * gap_s for record in records for gap_s in record.gaps_s()]
    num_generated = sum(record.num_generated for record in records)
    num_prefilled = sum(record.num_input for record in records if record.chunks)
    num_chunks = sum(len(record.chunks) for record in records)
    num_served_input = sum(record.num_input for record in served)
    outcomes = Counter(record.outcome for record in records)
    return Measures(
        wall_s=wall_s,
        num_offered=len(records),
        outcomes={outcome: outcomes[outcome] for outcome in OUTCOMES},
        served_as=dict(sorted(Counter(r.served_as for r in served if r.served_as).items())),
        ttft_ms=dist_ms(record.ttft_s for record in records),
        itl_ms=dist(gaps_ms),
        handoff_gap_ms=dist_ms(record.handoff_gap_s for record in served),
        tpot_ms=dist_ms(record.tpot_s for record in served),
        e2e_ms=dist_ms(record.e2e_s for record in served),
        queue_ms=dist_ms(record.queue_s for record in served),
        transfer_ms=dist_ms(record.transfer_s for record in served),
        num_gaps_over_50ms=sum(gap > 50 for gap in gaps_ms),
        num_gaps_over_100ms=sum(gap > 100 for gap in gaps_ms),
        output_tok_s=num_generated / wall_s if wall_s else 0.0,
        total_tok_s=(num_generated + num_prefilled) / wall_s if wall_s else 0.0,
        tokens_per_chunk=num_generated / num_chunks if num_chunks else None,
        cached_share=sum(r.num_cached for r in served) / max(num_served_input, 1),
    )


def dist_ms(seconds: Iterable[float | None]) -> Dist | None:
    """Of those that are there, in milliseconds."""
    return dist([1e3 * value for value in seconds if value is not None])


def dist(values: Sequence[float]) -> Dist | None:
    if not values:
        return None
    p50, p90, p95, p99, p999 = (float(p) for p in np.percentile(values, [50, 90, 95, 99, 99.9]))
    return Dist(
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        max=max(values),
        mean=sum(values) / len(values),
        count=len(values),
    )
