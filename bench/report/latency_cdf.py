"""Plot: how many requests, or gaps, took how long; one curve per deployment, tails drawn out.

    y: share that took no longer than x, on a scale that has p90, p99 and p99.9 equally far apart
    x: milliseconds, on a log scale

On plain axes a stall in one gap of a thousand would be a pixel; here it is a third of the height.
"""

from collections.abc import Mapping, Sequence
from math import log10
from typing import TYPE_CHECKING

from bench.records import RequestRecord
from bench.report.look import INK, looks, name_axes, new_axes, plain_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Tokens that came in one message have gaps of 0, which a log axis has no place for.
_FLOOR_MS = 0.1
_TICKS = ((0.0, "p0"), (0.3010, "p50"), (1.0, "p90"), (2.0, "p99"), (3.0, "p99.9"), (4.0, "p99.99"))


def draw(runs: Mapping[str, Sequence[RequestRecord]]) -> "Figure":
    """TTFT, ITL and E2E of each run's requests side by side; runs by deployment name."""
    figure, axes = new_axes(num_columns=3, width_in=11.0, height_in=3.9)
    look = looks(runs)
    panels = (
        ("TTFT: to the first token", ttfts_ms),
        ("ITL: every gap between tokens", gaps_ms),
        ("E2E: to the last token", e2es_ms),
    )
    for each, (title, values_of) in zip(axes, panels, strict=True):
        highest = 1.0
        for name, records in runs.items():
            values = values_of(records)
            xs, ys = curve(values)
            each.plot(
                xs,
                ys,
                color=look[name].colour,
                linestyle=look[name].dash,
                linewidth=1.8,
                label=name,
                drawstyle="steps-post",
            )
            highest = max(highest, *ys, 1.0)
        _scale(each, highest=highest)
        name_axes(each, x="ms (log)", y="", title=title)
    if len(runs) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=min(4, len(runs)),
            frameon=False,
            fontsize=9,
            labelcolor=INK.light,
            handlelength=3,
        )
    return figure


def curve(values_ms: Sequence[float]) -> tuple[list[float], list[float]]:
    """x: the values, sorted; y: -log10 of the share above, as if one more were above all."""
    ordered = sorted(max(value, _FLOOR_MS) for value in values_ms)
    num = len(ordered)
    xs, ys = _thinned(ordered)
    return xs, [-log10(1 - index / (num + 1)) for index in ys]


def ttfts_ms(records: Sequence[RequestRecord]) -> list[float]:
    return [1e3 * record.ttft_s for record in records if record.ttft_s is not None]


def gaps_ms(records: Sequence[RequestRecord]) -> list[float]:
    return [1e3 * gap_s for record in records for gap_s in record.gaps_s()]


def e2es_ms(records: Sequence[RequestRecord]) -> list[float]:
    return [
        1e3 * record.e2e_s
        for record in records
        if record.outcome == "ok" and record.e2e_s is not None
    ]


def _thinned(ordered: Sequence[float]) -> tuple[list[float], list[int]]:
    """Values and their ranks from 1 on: all of the slowest 500, and 500 of the rest."""
    num = len(ordered)
    step = max(1, (num - 500) // 500)
    ranks = [rank for rank in range(1, num + 1) if rank % step == 0 or rank > num - 500]
    return [ordered[rank - 1] for rank in ranks], ranks


def _scale(axes: "Axes", *, highest: float) -> None:
    axes.set_xscale("log")
    plain_log(axes.xaxis)
    ticks = [(at, label) for at, label in _TICKS if at <= highest + 0.05]
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(0, highest * 1.04)
