"""Tables of several deployments: figures as rows, medians as columns, the best one marked.

A figure's best value is marked only where it is ahead of the second by more than the A/A band:
what two runs of one deployment differ by is no merit.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from bench.report.page import Cell, Table, plain
from bench.run_log import LoggedRun
from bench.verdict import BETTER, WORSE, Figure, Finding

_TONES = {BETTER: "good", WORSE: "bad"}


def comparison_table(
    *,
    candidate: str,
    figures: Sequence[Figure],
    medians: Mapping[str, Mapping[str, float]],
    findings: Mapping[str, Sequence[Finding]],
) -> Table:
    """Medians by deployment, the A/A band, then what the candidate is against each rival."""
    rows = []
    for figure in figures:
        by_name = {name: values.get(figure.name) for name, values in medians.items()}
        found = {
            rival: next((one for one in all_ if one.figure == figure), None)
            for rival, all_ in findings.items()
        }
        band = next((one.band for one in found.values() if one and one.band is not None), None)
        best = best_beyond(by_name, figure=figure, band=band)
        rows.append(
            [
                Cell(_titled(figure)),
                *(
                    Cell(shown(value), "good" if name == best else "")
                    for name, value in by_name.items()
                ),
                Cell(shown_band(figure, band)),
                *(
                    Cell(one.describe(), _TONES.get(one.word, "")) if one else Cell("")
                    for one in found.values()
                ),
            ]
        )
    return Table(
        title="Medians, and what may be said",
        header=["", *medians, "A/A band", *(f"{candidate} / {rival}" for rival in findings)],
        rows=rows,
        note="Ratios below 1 are better for times, above 1 for tok/s; in brackets the 95 % "
        "interval. Counts, shares and goodput are compared as differences. A word is given only "
        "where the mean effect lies outside the A/A band and the interval on one side of equal; a "
        "median is marked only where it leads by more than the band.",
    )


def medians_table(figures: Sequence[Figure], runs: Sequence[LoggedRun]) -> Table:
    """Medians by deployment, with nothing marked: there is no A/A band."""
    names = list(dict.fromkeys(run.name for run in runs))
    rows = []
    for figure in figures:
        medians = [
            median(values) if (values := _values(figure, runs, name)) else None for name in names
        ]
        if any(value is not None for value in medians):
            rows.append([Cell(_titled(figure)), *(plain(shown(value)) for value in medians)])
    return Table(
        title="Medians",
        header=["", *names],
        rows=rows,
        note="Of the runs below. Without an A/A band it cannot be said which differences are real: "
        "disagg bench compare has one.",
    )


def best_beyond(
    values: Mapping[str, float | None], *, figure: Figure, band: float | None
) -> str | None:
    """Whose value leads the second best by more than the band; None: nobody's, or no band."""
    known = [(value, name) for name, value in values.items() if value is not None]
    if band is None or len(known) < 2:
        return None
    known.sort(key=lambda each: each[0], reverse=not figure.is_lower_better)
    (first, name), (second, _) = known[:2]
    if figure.is_difference:
        return name if abs(first - second) > band else None
    low, high = sorted((first, second))
    return name if low > 0 and high / low > 1 + band else None


def shown(value: float | None) -> str:
    """Three digits, and none after the point from 100 on."""
    if value is None:
        return ""
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def shown_band(figure: Figure, band: float | None) -> str:
    if band is None:
        return ""
    return f"±{shown(band)}" if figure.is_difference else f"±{100 * band:.1f} %"


def _titled(figure: Figure) -> str:
    return f"{figure.title}, {figure.unit}" if figure.unit else figure.title


def _values(figure: Figure, runs: Sequence[LoggedRun], name: str) -> list[float]:
    values = [run.figures.get(figure.name) for run in runs if run.name == name]
    return [value for value in values if value is not None]
