"""A plan's outlooks as a table, and as what --json writes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.measures import Dist
from bench.plan.advice import Outlook, best_of
from bench.plan.predict import Goodput, Prediction
from bench.report.page import Cell, Table

_MISSING = "–"


def outlook_tables(outlooks: Sequence[Outlook]) -> list[Table]:
    """Goodput, and if a rate was asked for what happens at it. The best goodput is marked."""
    best = best_of(outlooks)
    tables = [
        Table(
            title="Goodput: the highest rate at which 90 % of the requests keep the SLO",
            header=["deployment", "requests/s", "per node", "over the seeds"],
            rows=[_goodput_row(outlook, is_best=outlook is best) for outlook in outlooks],
        )
    ]
    asked = outlooks[0].at_rate
    if asked is not None:
        header = ["ms", "kept", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "busy P/D", "lost"]
        rows = [[Cell(one.name), *_at_rate(one.at_rate)] for one in outlooks if one.at_rate]
        title = f"At {asked.rate_per_s:.3g} requests/s"
        note = "busy: share of the time in steps; lost: refused + preempted"
        tables.append(Table(title=title, header=header, rows=rows, note=note))
    return tables


def to_json(outlooks: Sequence[Outlook], advice: Sequence[str]) -> dict[str, Any]:
    return {"advice": list(advice), "deployments": [_document(outlook) for outlook in outlooks]}


def _goodput_row(outlook: Outlook, *, is_best: bool) -> list[Cell]:
    goodput = outlook.goodput
    return [
        Cell(outlook.name),
        Cell(f"{goodput.mean:.3g}", "good" if is_best and goodput.mean else ""),
        Cell(f"{goodput.mean / outlook.num_nodes:.3g}"),
        Cell(f"{goodput.low:.3g} to {goodput.high:.3g}"),
    ]


def _at_rate(asked: Prediction) -> list[Cell]:
    prefill = _MISSING if asked.prefill_busy is None else f"{asked.prefill_busy:.0%}"
    return [
        Cell(f"{asked.attainment:.0%}", "bad" if asked.attainment < 0.9 else ""),
        *_percentiles(asked.ttft_ms, "p50", "p90", "p99"),
        *_percentiles(asked.tpot_ms, "p50", "p90"),
        Cell(f"{prefill}/{asked.decode_busy:.0%}"),
        Cell(f"{asked.num_refused}+{asked.num_preempted}"),
    ]


def _percentiles(dist: Dist | None, *names: str) -> list[Cell]:
    return [Cell(_MISSING if dist is None else f"{getattr(dist, name):.0f}") for name in names]


def _document(outlook: Outlook) -> dict[str, Any]:
    return {
        "name": outlook.name,
        "goodput_rps": _goodput(outlook.goodput),
        "at_rate": None if outlook.at_rate is None else asdict(outlook.at_rate),
    }


def _goodput(goodput: Goodput) -> dict[str, Any]:
    return {
        "mean": goodput.mean,
        "low": goodput.low,
        "high": goodput.high,
        "per_seed": list(goodput.per_seed),
    }
