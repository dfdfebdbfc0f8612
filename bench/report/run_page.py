"""The page of one run: every measure, latencies, gaps over time, goodput against rate if searched.

summary of a run (bench/run.py), its requests --run_page--> Page
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.records import RequestRecord
from bench.report import attainment_curve, gaps_over_time, latency_cdf
from bench.report.attainment_curve import Curve
from bench.report.facts import facts_of, slo_text, text
from bench.report.measure_tables import count_table, latency_table, percent
from bench.report.page import Cell, Page, Plot, Stamp, Table, plain
from bench.report.side_by_side import shown

# Shown as tables and boxes; everything else of a summary is a fact.
_SHOWN = ("name", "measures", "validity", "slo", "attainment", "goodput", "nodes")


def run_page(summary: Mapping[str, Any], records: Sequence[RequestRecord]) -> Page:
    """summary as in the run's JSON."""
    name = summary.get("name", "run")
    measures = summary["measures"]
    slo = slo_text(summary.get("slo") or {})
    tables = [
        latency_table(measures),
        count_table(measures, slo=slo, attainment=summary.get("attainment")),
    ]
    if summary.get("nodes"):
        tables.append(node_table(summary["nodes"]))
    plots = _plots(name, records)
    if summary.get("goodput"):
        plots.append(goodput_plot(name, summary["goodput"]))
    return Page(
        title=f"Load on {name}",
        stamp=stamp_of(summary.get("validity", {})),
        facts=facts_of(summary, without=_SHOWN),
        tables=tables,
        plots=plots,
    )


def stamp_of(validity: Mapping[str, Any]) -> Stamp:
    """From Validity of bench/self_check.py: its reasons, or what the client did to itself."""
    reasons = tuple(validity.get("reasons", ()))
    if reasons:
        return Stamp(is_valid=False, reasons=reasons)
    checked = facts_of(validity, without=("reasons", "is_valid"))
    return Stamp(is_valid=True, reasons=[f"{name}: {value}" for name, value in checked])


def node_table(nodes: Mapping[str, Mapping[str, Any]]) -> Table:
    """What each node did, by its name; shares as percent."""
    columns = list(dict.fromkeys(key for values in nodes.values() for key in values))
    return Table(
        title="Nodes",
        header=["", *(column.replace("_", " ") for column in columns)],
        rows=[
            [Cell(name), *(plain(_node_value(column, values.get(column))) for column in columns)]
            for name, values in nodes.items()
        ],
    )


def goodput_plot(name: str, goodput: Mapping[str, Any]) -> Plot:
    curve = Curve(
        points=[(rate, share) for rate, share in goodput["tried"]],
        goodput_per_s=goodput["rate_per_s"],
    )
    return Plot(
        title="Goodput against rate",
        file="goodput",
        figure=attainment_curve.draw({name: curve}),
        caption="Every dot is a run of the search. Goodput is the highest rate at which 90 % of "
        f"all offered requests met the SLO: {shown(curve.goodput_per_s)} requests/s.",
    )


def _plots(name: str, records: Sequence[RequestRecord]) -> list[Plot]:
    if not any(record.chunks for record in records):
        return []
    return [
        Plot(
            title="Latency",
            file="latency",
            figure=latency_cdf.draw({name: records}),
            caption="Further left is faster; the vertical scale spreads the tail, so that a curve "
            "that turns right at p99 stalls one gap in a hundred.",
        ),
        Plot(
            title="Gaps over time",
            file="gaps",
            figure=gaps_over_time.draw({name: records}),
            caption="Every gap between two messages with tokens. Shaded: a long prompt waits for "
            "its first token; long is what is labelled so, or has four times the median's tokens.",
        ),
    ]


def _node_value(column: str, value: object) -> str:
    if isinstance(value, float):
        return percent(value) if "share" in column or "utilisation" in column else shown(value)
    return "" if value is None else text(value)
