"""Plot: prediction against measurement, figure by figure; on the diagonal the plan was right.

y: predicted, x: measured, both log and in the figure's unit; shades: within 15 % and 30 %
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.report.look import MUTED, looks, name_axes, new_axes, plain_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BANDS = (0.15, 0.30)
_MARKS = "osD^vP*X"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One figure of one deployment under one load, if it is named; both values above 0."""

    figure: str
    unit: str
    name: str
    predicted: float
    measured: float
    load: str = ""

    @property
    def error(self) -> float:
        """Relative to what was measured; above 0: predicted too high."""
        return self.predicted / self.measured - 1


def draw(pairs: Sequence[Pair]) -> "Figure":
    """One panel per figure."""
    by_figure: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_figure[pair.figure].append(pair)
    figure, panels = new_axes(
        num_columns=max(1, len(by_figure)), width_in=0.6 + 3.4 * len(by_figure), height_in=4.4
    )
    names = list(dict.fromkeys(pair.name for pair in pairs))
    look = looks(names)
    for axes, (title, chosen) in zip(panels, by_figure.items(), strict=False):
        _diagonal(axes, chosen)
        for name in names:
            own = [pair for pair in chosen if pair.name == name]
            axes.plot(
                [pair.measured for pair in own],
                [pair.predicted for pair in own],
                linestyle="",
                marker=_MARKS[names.index(name) % len(_MARKS)],
                markersize=6,
                alpha=0.85,
                color=look[name].colour,
                label=name,
            )
        unit = chosen[0].unit
        name_axes(axes, x=f"measured, {unit}", y=f"predicted, {unit}", title=title)
    if panels[0].lines:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(5, len(names)),
            frameon=False,
            fontsize=9,
            labelcolor=MUTED.light,
        )
    return figure


def _diagonal(axes: "Axes", pairs: Sequence[Pair]) -> None:
    values = [value for pair in pairs for value in (pair.predicted, pair.measured)]
    low, high = 0.8 * min(values), 1.25 * max(values)
    for band in BANDS:
        axes.fill_between(
            [low, high],
            [low * (1 - band), high * (1 - band)],
            [low * (1 + band), high * (1 + band)],
            color=MUTED.light,
            alpha=0.13,
            linewidth=0,
        )
    axes.plot([low, high], [low, high], color=MUTED.light, linewidth=1.0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    axes.set_aspect("equal")
