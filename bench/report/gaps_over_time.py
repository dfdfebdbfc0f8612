"""Plot: every gap between two tokens, at the time when it ended; long prompts as shaded spans.

    y: gap in ms, log;  x: seconds since the run began;  shade: a long prompt is waiting for its
    first token

Whether long prompts stall running streams is seen at a glance: dots rise within the shade, or not.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from bench.records import RequestRecord
from bench.report.look import INK, LONG, MUTED, looks, name_axes, new_axes, plain_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIMITS_MS = (50.0, 100.0)
_FLOOR_MS = 0.1
# Without labels: a long prompt has so many times the median's tokens, and so many at least.
_LONG_FACTOR, _LONG_TOKENS = 4, 512


def draw(runs: Mapping[str, Sequence[RequestRecord]]) -> "Figure":
    """One strip per run, under each other on the same axes' limits."""
    figure, strips = new_axes(num_rows=len(runs), height_in=1.0 + 2.0 * len(runs))
    look = looks(runs)
    everything = [gap for records in runs.values() for _, gap in timed_gaps_ms(records)]
    bottom = min(everything, default=1.0)
    top = max(everything, default=1.0)
    for axes, (name, records) in zip(strips, runs.items(), strict=True):
        _strip(axes, records, colour=look[name].colour)
        axes.set_ylim(max(bottom * 0.7, _FLOOR_MS), max(top * 1.5, LIMITS_MS[-1] * 1.5))
        plain_log(axes.yaxis)
        name_axes(axes, x="", y="gap, ms (log)", title=name)
    if any(long_spans_s(records) for records in runs.values()):
        strips[0].set_title(
            "shaded: a long prompt waits for its first token",
            color=LONG.light,
            fontsize=9,
            loc="right",
        )
    strips[-1].set_xlabel("seconds since the run began", color=INK.light, fontsize=9)
    return figure


def timed_gaps_ms(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """(when it ended in s, gap in ms) of the gaps between chunks; tokens within one have none."""
    return [
        (after[0], 1e3 * (after[0] - before[0]))
        for record in records
        for before, after in zip(record.chunks, record.chunks[1:], strict=False)
    ]


def long_spans_s(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """(sent, first token) of the long prompts: those labelled so, else far above the median."""
    long = [record for record in records if record.label == "long"]
    if not long and records:
        least = max(_LONG_TOKENS, _LONG_FACTOR * median(record.num_input for record in records))
        long = [record for record in records if record.num_input >= least]
    return [(record.sent_s, record.chunks[0][0]) for record in long if record.chunks]


def _strip(axes: "Axes", records: Sequence[RequestRecord], *, colour: str) -> None:
    for start_s, end_s in long_spans_s(records):
        axes.axvspan(start_s, end_s, color=LONG.light, alpha=0.22, linewidth=0)
    gaps = timed_gaps_ms(records)
    axes.set_yscale("log")
    axes.scatter(
        [at_s for at_s, _ in gaps],
        [max(gap, _FLOOR_MS) for _, gap in gaps],
        s=5,
        alpha=0.55,
        color=colour,
        linewidths=0,
        # Tens of thousands of dots: as pixels, also in a vector figure.
        rasterized=True,
    )
    for limit_ms in LIMITS_MS:
        axes.axhline(limit_ms, color=MUTED.light, linewidth=0.9, linestyle=(0, (4, 3)))
        num_over = sum(gap > limit_ms for _, gap in gaps)
        axes.annotate(
            f"{num_over} over {limit_ms:g} ms",
            (1, limit_ms),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
            va="center",
            color=MUTED.light,
            annotation_clip=False,
        )
