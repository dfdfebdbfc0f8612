"""The numbers of a run that comparisons show and judge, in the order of the table.

    Measures of a run (bench/measures.py), its attainment --figures_of--> {name: value or None}

What can be 0 (shares, counts) is compared by difference, times and rates as ratios.
"""

from dataclasses import replace

from bench.measures import Dist, Measures
from bench.verdict import Figure

GOODPUT = Figure(
    name="goodput_rps",
    title="goodput",
    unit="requests/s",
    is_lower_better=False,
    is_difference=True,
)
ATTAINMENT = Figure(
    name="attainment", title="SLO attainment", unit="", is_lower_better=False, is_difference=True
)
_PERCENTILES = {
    "p50": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
    "p999": "p99.9",
    "max": "max",
}
_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
# Stages that are 0 for requests which do not wait or move.
_STAGES = {"handoff_gap": "handoff gap", "queue": "queue", "transfer": "transfer"}
_COUNT = Figure(name="", title="", unit="", is_difference=True)
_RATE = Figure(name="", title="", unit="tok/s", is_lower_better=False)

FIGURES = (
    GOODPUT,
    ATTAINMENT,
    *(
        Figure(name=f"{name}_{key}_ms", title=f"{title} {percentile}")
        for name, title in _LATENCIES.items()
        for key, percentile in _PERCENTILES.items()
    ),
    replace(_COUNT, name="gaps_over_50ms", title="gaps > 50 ms"),
    replace(_COUNT, name="gaps_over_100ms", title="gaps > 100 ms"),
    *(
        Figure(name=f"{name}_{key}_ms", title=f"{title} {key}", is_difference=True)
        for name, title in _STAGES.items()
        for key in ("p50", "p99")
    ),
    replace(_RATE, name="output_tok_s", title="output"),
    replace(_RATE, name="total_tok_s", title="prompt and output"),
    replace(_COUNT, name="tokens_per_chunk", title="tokens per chunk"),
    replace(_COUNT, name="num_missed", title="refused, failed or unfinished"),
)


def figures_of(measures: Measures, *, attainment: float | None) -> dict[str, float | None]:
    """All but the goodput, which takes many runs."""
    dists: dict[str, Dist | None] = {
        "ttft": measures.ttft_ms,
        "tpot": measures.tpot_ms,
        "itl": measures.itl_ms,
        "e2e": measures.e2e_ms,
        "handoff_gap": measures.handoff_gap_ms,
        "queue": measures.queue_ms,
        "transfer": measures.transfer_ms,
    }
    return {
        ATTAINMENT.name: attainment,
        **{
            f"{name}_{key}_ms": None if dist is None else getattr(dist, key)
            for name, dist in dists.items()
            for key in (_PERCENTILES if name in _LATENCIES else ("p50", "p99"))
        },
        "gaps_over_50ms": measures.num_gaps_over_50ms,
        "gaps_over_100ms": measures.num_gaps_over_100ms,
        "output_tok_s": measures.output_tok_s,
        "total_tok_s": measures.total_tok_s,
        "tokens_per_chunk": measures.tokens_per_chunk,
        "num_missed": measures.num_offered - measures.outcomes["ok"],
    }
