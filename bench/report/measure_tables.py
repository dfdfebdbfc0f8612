"""The tables of one run, from Measures.to_dict (bench/measures.py)."""

from collections.abc import Mapping
from typing import Any

from bench.report.page import Cell, Table, plain
from bench.report.side_by_side import shown

# Name in Measures, and what it is called.
LATENCIES = (
    ("ttft_ms", "TTFT"),
    ("itl_ms", "ITL (every gap)"),
    ("handoff_gap_ms", "handoff gap"),
    ("tpot_ms", "TPOT"),
    ("e2e_ms", "E2E"),
    ("queue_ms", "queue"),
    ("transfer_ms", "transfer"),
)
PERCENTILES = (
    ("p50", "p50"),
    ("p90", "p90"),
    ("p95", "p95"),
    ("p99", "p99"),
    ("p999", "p99.9"),
    ("max", "max"),
)
# Of these several are 0 in a good run.
_BAD_OUTCOMES = ("refused", "failed", "unfinished")


def latency_table(measures: Mapping[str, Any]) -> Table:
    """Every latency at every percentile; those that no request has are left out."""
    rows = []
    for name, title in LATENCIES:
        dist = measures.get(name)
        if dist:
            cells = [plain(shown(dist[key])) for key, _ in PERCENTILES]
            rows.append([Cell(title), *cells, plain(dist["count"])])
    return Table(
        title="Latency, ms",
        header=["", *(title for _, title in PERCENTILES), "values"],
        rows=rows,
        note="TTFT counts from when a request should have been sent. TPOT, E2E, queue and transfer "
        "are of requests that were served whole.",
    )


def count_table(
    measures: Mapping[str, Any], *, slo: str = "", attainment: float | None = None
) -> Table:
    """Rates, shares and counts: what percentiles cannot show."""
    outcomes: Mapping[str, int] = measures["outcomes"]
    num_gaps = (measures.get("itl_ms") or {}).get("count", 0)
    rows = [[Cell("requests offered"), plain(measures["num_offered"])]]
    if attainment is not None:
        rows.append([Cell(f"SLO attainment: {slo}"), plain(percent(attainment))])
    for outcome, num in outcomes.items():
        tone = "bad" if num and outcome in _BAD_OUTCOMES else ""
        rows.append([Cell(f"requests {outcome}"), Cell(str(num), tone)])
    for served_as, num in measures.get("served_as", {}).items():
        rows.append([Cell(f"served as {served_as}"), plain(num)])
    rows += [
        [Cell("output, tok/s"), plain(shown(measures["output_tok_s"]))],
        [Cell("prompt and output, tok/s"), plain(shown(measures["total_tok_s"]))],
        [
            Cell("gaps over 50 ms"),
            plain(_of(measures["num_gaps_over_50ms"], num_gaps)),
        ],
        [
            Cell("gaps over 100 ms"),
            plain(_of(measures["num_gaps_over_100ms"], num_gaps)),
        ],
        [Cell("tokens per chunk"), plain(shown(measures.get("tokens_per_chunk")))],
        [Cell("prompt tokens from cache"), plain(percent(measures["cached_share"]))],
        [Cell("lasted, s"), plain(shown(measures["wall_s"]))],
    ]
    return Table(
        title="Requests and tokens",
        header=["", "value"],
        rows=rows,
        note="Refused, failed, unfinished and late requests miss the SLO. More than one token per "
        "chunk means that gaps may be hidden in merged messages.",
    )


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _of(num: int, num_in_all: int) -> str:
    return f"{num} of {num_in_all}" if num_in_all else str(num)
