"""How far predictions are from what was measured under the same requests.

(Measures predicted, Measures measured, attainments) --> Agreement --> errors, relative
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.measures import Dist, Measures
from bench.report.page import Cell, Table

# A prediction further off than this is marked.
_FAR = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of one run; None where it was not there."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Relative to what was measured."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of one run: which deployment, which trace, at which rate. problems make it invalid."""

    deployment: str
    trace: str
    rate_per_s: float
    figures: tuple[Figure, ...]
    problems: tuple[str, ...] = ()


def figures(
    predicted: Measures, measured: Measures, *, attainments: tuple[float, float]
) -> tuple[Figure, ...]:
    """attainments are (predicted, measured)."""
    pairs = (
        ("TTFT p50", _of(predicted.ttft_ms, "p50"), _of(measured.ttft_ms, "p50")),
        ("TTFT p90", _of(predicted.ttft_ms, "p90"), _of(measured.ttft_ms, "p90")),
        ("TPOT p50", _of(predicted.tpot_ms, "p50"), _of(measured.tpot_ms, "p50")),
        ("SLO kept", *attainments),
    )
    return tuple(Figure(name=name, predicted=p, measured=m) for name, p, m in pairs)


def agreement_table(runs: Sequence[Agreement]) -> Table:
    """Predicted / measured and the error of each figure, a row per run."""
    return Table(
        title="Predicted / measured",
        header=["run", "requests/s", *(figure.name for figure in runs[0].figures)],
        rows=[
            [
                Cell(f"{run.deployment}, {run.trace}", "bad" if run.problems else ""),
                Cell(f"{run.rate_per_s:.3g}"),
                *(_cell(figure) for figure in run.figures),
            ]
            for run in runs
        ],
        note="the error is relative to what was measured; a run in red was invalid",
    )


def error_table(runs: Sequence[Agreement]) -> Table:
    """Median and largest error of each figure, over valid runs, and over all figures."""
    errors: dict[str, list[float]] = {}
    for run in runs:
        for figure in () if run.problems else run.figures:
            if figure.error is not None:
                errors.setdefault(figure.name, []).append(abs(figure.error))
    everything = [error for of_one in errors.values() for error in of_one]
    rows = [*errors.items(), *([("all", everything)] if everything else [])]
    return Table(
        title="Errors",
        header=["figure", "median", "max", "runs"],
        rows=[
            [
                Cell(name),
                Cell(f"{statistics.median(values):.1%}"),
                Cell(f"{max(values):.1%}"),
                Cell(f"{len(values)}"),
            ]
            for name, values in rows
        ],
    )


def _of(dist: Dist | None, name: str) -> float | None:
    return None if dist is None else float(getattr(dist, name))


def _cell(figure: Figure) -> Cell:
    if figure.predicted is None or figure.measured is None:
        return Cell("–")
    error = figure.error
    told = "" if error is None else f" {error:+.0%}"
    is_far = error is not None and abs(error) > _FAR
    return Cell(f"{figure.predicted:.3g}/{figure.measured:.3g}{told}", "bad" if is_far else "")
