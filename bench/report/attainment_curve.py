"""Plot: SLO attainment against rate, the 90 % line, and the rate at which each curve leaves it.

y: share of all offered requests that met the SLO;  x: requests offered per second
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.report.look import GOOD, label_lines, looks, name_axes, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOAL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """(rate, attainment) of each run; goodput_per_s is the highest rate that held, None: none."""

    points: Sequence[tuple[float, float]]
    goodput_per_s: float | None = None


def draw(curves: Mapping[str, Curve]) -> "Figure":
    """One curve per deployment; every dot is a run."""
    figure, (axes,) = new_axes(height_in=3.8)
    look = looks(curves)
    axes.axhline(100 * GOAL, color=GOOD.light, linewidth=1.2, linestyle=(0, (6, 3)))
    axes.set_ylim(-3, 106)
    ends = []
    for name, curve in curves.items():
        points = sorted(curve.points)
        if not points:
            continue
        colour = look[name].colour
        axes.plot(
            [rate for rate, _ in points],
            [100 * share for _, share in points],
            color=colour,
            linestyle=look[name].dash,
            linewidth=1.8,
            marker="o",
            markersize=5,
        )
        ends.append((points[-1][0], 100 * points[-1][1], name, colour))
        if curve.goodput_per_s:
            _mark(axes, curve.goodput_per_s, colour)
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    figure.draw_without_rendering()
    axes.annotate(
        f"goal: {100 * GOAL:.0f} %",
        (0, 100 * GOAL),
        xytext=(4, -4),
        textcoords="offset points",
        color=GOOD.light,
        fontsize=9,
        va="top",
    )
    label_lines(axes, ends)
    name_axes(axes, x="offered rate, requests/s", y="requests that met the SLO, %")
    return figure


def _mark(axes: "Axes", goodput_per_s: float, colour: str) -> None:
    """A line from the goal down to the axis, with the goodput in figures."""
    axes.plot(
        [goodput_per_s, goodput_per_s], [-3, 100 * GOAL], color=colour, linewidth=1.0, alpha=0.8
    )
    axes.plot([goodput_per_s], [100 * GOAL], color=colour, marker="v", markersize=9)
    axes.annotate(
        f"goodput {goodput_per_s:.3g}/s",
        (goodput_per_s, 0),
        xytext=(-4, 4),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="bottom",
        fontsize=9,
        color=colour,
    )
