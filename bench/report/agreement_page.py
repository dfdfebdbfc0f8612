"""The page of prediction against measurement: every error, and what they come to."""

from collections.abc import Sequence
from statistics import median

from bench.report import agreement
from bench.report.agreement import Pair
from bench.report.page import Cell, Page, Plot, Stamp, Table, plain
from bench.report.side_by_side import shown

ALLOWED_MEDIAN, ALLOWED_WORST = agreement.BANDS


def agreement_page(
    pairs: Sequence[Pair], *, title: str, stamp: Stamp, facts: Sequence[tuple[str, str]]
) -> Page:
    """The verdict is the errors of all pairs together."""
    return Page(
        title=title,
        stamp=stamp,
        verdict=verdict(pairs),
        facts=facts,
        tables=[summary_table(pairs), error_table(pairs)],
        plots=[
            Plot(
                title="Prediction against measurement",
                file="agreement",
                figure=agreement.draw(pairs),
                caption="On the line the plan was right; the shades are 15 % and 30 % around it. "
                "Above the line it promised more than came.",
            )
        ]
        if pairs
        else [],
    )


def verdict(pairs: Sequence[Pair]) -> str:
    """The median error and the largest one."""
    sizes = [abs(pair.error) for pair in pairs]
    if not sizes:
        return "nothing was compared"
    return (
        f"{len(sizes)} predictions: median error {_percent(median(sizes))}, "
        f"largest {_percent(max(sizes))}"
    )


def summary_table(pairs: Sequence[Pair]) -> Table:
    """Per figure; what is past the bounds is marked."""
    rows = []
    for figure in dict.fromkeys(pair.figure for pair in pairs):
        sizes = [abs(pair.error) for pair in pairs if pair.figure == figure]
        middle, worst = median(sizes), max(sizes)
        rows.append(
            [
                Cell(figure),
                Cell(_percent(middle), "bad" if middle > ALLOWED_MEDIAN else ""),
                Cell(_percent(worst), "bad" if worst > ALLOWED_WORST else ""),
                plain(len(sizes)),
            ]
        )
    return Table(
        title="Errors by figure",
        header=["", "median error", "largest", "predictions"],
        rows=rows,
        note=f"Marked: a median above {_percent(ALLOWED_MEDIAN)}, "
        f"a largest above {_percent(ALLOWED_WORST)}.",
    )


def error_table(pairs: Sequence[Pair]) -> Table:
    """Every prediction, in the order given."""
    return Table(
        title="Every prediction",
        header=["", "figure", "predicted", "measured", "error"],
        rows=[
            [
                Cell(f"{pair.name}, {pair.load}" if pair.load else pair.name),
                plain(f"{pair.figure}, {pair.unit}"),
                plain(shown(pair.predicted)),
                plain(shown(pair.measured)),
                Cell(
                    f"{100 * pair.error:+.1f} %", "bad" if abs(pair.error) > ALLOWED_WORST else ""
                ),
            ]
            for pair in pairs
        ],
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
