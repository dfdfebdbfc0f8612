"""Plot: goodput against P:D ratio: what was measured, on the line that was predicted.

y: requests/s at 90 % attainment;  x: the splits of the same nodes, few prefill nodes first;
band: what the plan calls its error
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.report.look import INK, MUTED, PAPER, looks, name_axes, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A goodput in requests/s, and how low and high it may be."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One split, by name as in bench/deployment.py; measured in requests/s."""

    name: str
    measured: float | None = None
    predicted: Spread | None = None

    @property
    def is_colocated(self) -> bool:
        return "colocated" in self.name


def draw(splits: Sequence[Split]) -> "Figure":
    """In the order in which they are shown: colocated first, then 1P, 2P, ..."""
    figure, (axes,) = new_axes(width_in=max(7.0, 2.5 + 0.7 * len(splits)), height_in=4.2)
    _draw_predicted(axes, splits)
    _draw_measured(axes, splits)
    axes.set_xticks(range(len(splits)), [_tick(split.name) for split in splits])
    axes.set_xlim(-0.5, len(splits) - 0.5)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    name_axes(axes, x="split of the same nodes", y="goodput, requests/s")
    axes.legend(
        handles=_legend(),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        frameon=False,
        fontsize=9,
        labelcolor=INK.light,
    )
    return figure


def _draw_measured(axes: "Axes", splits: Sequence[Split]) -> None:
    """With its value beside each point."""
    # All ratios of a split are one kind of serving, and have one colour.
    look = looks(["colocated", "1P1D"])
    for x, split in enumerate(splits):
        if split.measured is None:
            continue
        colour = look["colocated" if split.is_colocated else "1P1D"].colour
        marker = "s" if split.is_colocated else "o"
        axes.plot([x], [split.measured], color=colour, marker=marker, markersize=8)
        axes.annotate(
            f"{split.measured:.3g}",
            (x, split.measured),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=10,
            # Readable on the line of the prediction too.
            bbox={"facecolor": PAPER.light, "edgecolor": "none", "pad": 1.0, "alpha": 0.8},
            color=colour,
        )


def _draw_predicted(axes: "Axes", splits: Sequence[Split]) -> None:
    """The line joins ratios; colocated serving is no ratio and stands alone."""
    for is_colocated in (True, False):
        chosen = [
            (x, split.predicted)
            for x, split in enumerate(splits)
            if split.predicted and split.is_colocated == is_colocated
        ]
        if not chosen:
            continue
        xs = [x + shift for x, _ in chosen for shift in ((-0.2, 0.2) if is_colocated else (0,))]
        spreads = [spread for _, spread in chosen for _ in range(2 if is_colocated else 1)]
        axes.fill_between(
            xs,
            [spread.low for spread in spreads],
            [spread.high for spread in spreads],
            color=MUTED.light,
            alpha=0.2,
            linewidth=0,
        )
        axes.plot(
            xs,
            [spread.mean for spread in spreads],
            color=MUTED.light,
            linewidth=1.6,
            marker="" if is_colocated else ".",
        )


def _legend() -> list[object]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], color=MUTED.light, linewidth=1.6, label="predicted"),
        Patch(color=MUTED.light, alpha=0.2, linewidth=0, label="its error band"),
        Line2D([], [], color=MUTED.light, marker="o", markersize=7, linewidth=0, label="measured"),
    ]


def _tick(name: str) -> str:
    return name.replace("colocated ", "colocated\n")
