"""The page of a ratio sweep: goodput of each split, measured, on the line that was predicted."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.report import ratio_curve
from bench.report.page import Cell, Page, Plot, Stamp, Table, plain
from bench.report.ratio_curve import Split, Spread
from bench.report.side_by_side import shown


def ratio_page(
    points: Sequence[Mapping[str, Any]],
    *,
    title: str,
    verdict: str,
    stamp: Stamp,
    facts: Sequence[tuple[str, str]],
) -> Page:
    """points: RatioPoint.to_dict of bench/ratio.py, in the order in which they are shown."""
    splits = [split_of(point) for point in points]
    return Page(
        title=title,
        stamp=stamp,
        verdict=verdict,
        facts=facts,
        tables=[ratio_table(splits)],
        plots=[
            Plot(
                title="Goodput against ratio",
                file="ratio",
                figure=ratio_curve.draw(splits),
                caption="Goodput is the highest rate at which 90 % of all offered requests met the "
                "SLO. Dots are measured, the line is what the plan predicts for the same load.",
            )
        ],
    )


def split_of(point: Mapping[str, Any]) -> Split:
    mean, low, high = (point.get(f"predicted_{part}") for part in ("rps", "low_rps", "high_rps"))
    return Split(
        name=point["name"],
        measured=point.get("goodput_rps"),
        predicted=None
        if mean is None
        else Spread(
            mean=mean, low=mean if low is None else low, high=mean if high is None else high
        ),
    )


def ratio_table(splits: Sequence[Split]) -> Table:
    """Nothing is marked: each split is measured once, and near ones may be a tie."""
    errors = [error_of(split) for split in splits]
    sizes = [abs(error) for error in errors if error is not None]
    return Table(
        title="Goodput, requests/s",
        header=["split", "measured", "predicted", "band", "error of the prediction"],
        rows=[
            [
                Cell(split.name),
                plain(shown(split.measured)),
                plain(shown(split.predicted.mean) if split.predicted else ""),
                plain(
                    f"{shown(split.predicted.low)} to {shown(split.predicted.high)}"
                    if split.predicted
                    else ""
                ),
                plain("" if error is None else f"{100 * error:+.1f} %"),
            ]
            for split, error in zip(splits, errors, strict=True)
        ],
        note=_note(sizes),
    )


def error_of(split: Split) -> float | None:
    """Of the prediction, relative to what was measured."""
    if split.predicted is None or not split.measured:
        return None
    return split.predicted.mean / split.measured - 1


def _note(sizes: Sequence[float]) -> str:
    note = "Each split was measured once: near ones may be a tie. "
    if sizes:
        note += (
            f"Errors of the prediction: median {100 * median(sizes):.1f} %, "
            f"largest {100 * max(sizes):.1f} %."
        )
    return note.strip()
