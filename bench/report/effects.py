"""Plot: what a comparison found, figure by figure: effect, its interval, and the A/A band.

    x: candidate / rival (1: equal), log;  y: the figures;  shade: what A/A reaches without a
    difference. An interval that touches the shade says nothing.

Only figures that are compared as ratios are drawn; differences have other units, and are in the
table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.report.look import BAD, GOOD, MUTED, name_axes, new_axes, plain_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Of one figure, as ratios; band is the width around 1. word: better, worse or cannot tell."""

    title: str
    ratio: float
    low: float
    high: float
    band: float
    word: str


def draw(effects: Sequence[Effect], *, candidate: str, rival: str) -> "Figure":
    """The first effect on top."""
    figure, (axes,) = new_axes(height_in=1.5 + 0.34 * max(1, len(effects)))
    axes.set_xscale("log")
    for row, effect in enumerate(effects):
        _row(axes, effect, y=len(effects) - 1 - row)
    axes.axvline(1.0, color=MUTED.light, linewidth=1.0)
    axes.set_yticks(range(len(effects)), [effect.title for effect in reversed(effects)], fontsize=9)
    axes.set_ylim(-0.7, max(0, len(effects) - 1) + 0.7)
    axes.grid(visible=False, axis="y")
    _limits(axes, effects)
    plain_log(axes.xaxis)
    name_axes(axes, x=f"{candidate} / {rival} (log; 1: equal)", y="")
    return figure


def _row(axes: "Axes", effect: Effect, *, y: int) -> None:
    colour = {"better": GOOD.light, "worse": BAD.light}.get(effect.word, MUTED.light)
    axes.fill_betweenx(
        [y - 0.35, y + 0.35],
        1 / (1 + effect.band),
        1 + effect.band,
        color=MUTED.light,
        alpha=0.22,
        linewidth=0,
    )
    axes.plot([effect.low, effect.high], [y, y], color=colour, linewidth=2.2)
    axes.plot([effect.ratio], [y], color=colour, marker="o", markersize=6)
    axes.annotate(
        f"{effect.ratio:.2f}x  {effect.word}",
        (1, y),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=colour,
        annotation_clip=False,
    )


def _limits(axes: "Axes", effects: Sequence[Effect]) -> None:
    """As far below 1 as above it, so that half and double look alike."""
    ends = [end for e in effects for end in (e.high, 1 / e.low, 1 + e.band) if end > 0]
    reach = 1.1 * max([1.2, *ends])
    axes.set_xlim(1 / reach, reach)
