"""What pairs of runs allow to say, in words, and what not.

    A/A pairs (the same deployment against itself) --> band: how far the mean effect can lie from
                                                       nothing though nothing differs
    A/B pairs --> mean effect and its interval --> the mean outside the band, the interval without
                                                   equal: better or worse; else: cannot tell

A figure is compared as a ratio per pair, or as a difference where it can be 0 (shares, counts).
The word on serving follows from the deciding figure, SLO attainment or goodput, against every
colocated baseline; the other figures are reported beside it, each with a word of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.bootstrap import NUM_RESAMPLES, differences, log_ratios, mean_interval

# With fewer pairs, their own range is no 95 % interval whatever is done to them.
MIN_PAIRS = 5
# A ratio nearer to equal than this is never called a difference, however steady it is.
LEAST_BAND = 0.01

BETTER, WORSE, CANNOT_TELL = "better", "worse", "cannot tell"
DISAGGREGATE, COLOCATE = "disaggregate", "colocate"

# Of the candidate and of the rival, one per pair; None: the run has no such figure.
Pairs = Sequence[tuple[float | None, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a run. is_difference: compared by difference, because it can be 0."""

    name: str
    title: str
    unit: str = "ms"
    is_lower_better: bool = True
    is_difference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A figure of the candidate against a rival's: effect and interval are ratios (1 is equal) or
    differences (0 is equal), as the figure says; band is the width around equal that A/A reaches.
    """

    figure: Figure
    rival: str
    word: str
    num_pairs: int
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    band: float | None = None

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "figure": self.figure.name}

    def describe(self) -> str:
        """The effect with its interval, and the word."""
        if self.effect is None or self.low is None or self.high is None:
            return f"{self.word} ({self.num_pairs} pairs)"
        if self.figure.is_difference:
            return f"{self.effect:+.3g} ({self.low:+.3g} to {self.high:+.3g}) {self.word}"
        return f"{self.effect:.2f}x ({self.low:.2f} to {self.high:.2f}) {self.word}"


def find(
    figure: Figure,
    *,
    rival: str,
    same: Pairs,
    pairs: Pairs,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> Finding:
    """Compares one figure. same are the A/A pairs, pairs are (candidate, rival)."""
    same_effects, effects = _effects(figure, same), _effects(figure, pairs)
    if min(len(same_effects), len(effects)) < MIN_PAIRS:
        return Finding(figure=figure, rival=rival, word=CANNOT_TELL, num_pairs=len(effects))
    band = mean_interval(same_effects, seed=seed, num_resamples=num_resamples).reach
    if not figure.is_difference:
        band = max(band, math.log1p(LEAST_BAND))
    interval = mean_interval(effects, seed=seed + 1, num_resamples=num_resamples)
    word = CANNOT_TELL
    if interval.low > 0 and interval.mean > band:
        word = WORSE if figure.is_lower_better else BETTER
    elif interval.high < 0 and interval.mean < -band:
        word = BETTER if figure.is_lower_better else WORSE
    shown = (interval.mean, interval.low, interval.high)
    if not figure.is_difference:
        shown = (math.exp(shown[0]), math.exp(shown[1]), math.exp(shown[2]))
        band = math.exp(band) - 1
    return Finding(
        figure=figure,
        rival=rival,
        word=word,
        num_pairs=len(effects),
        effect=shown[0],
        low=shown[1],
        high=shown[2],
        band=band,
    )


def decide(findings: Mapping[str, Finding]) -> str:
    """disaggregate, colocate or cannot tell, from the deciding figure against each colocated
    baseline: it takes every one of them to be worse, and one that is better to colocate."""
    words = {finding.word for finding in findings.values()}
    if WORSE in words:
        return COLOCATE
    return DISAGGREGATE if words == {BETTER} else CANNOT_TELL


def explain(word: str, findings: Mapping[str, Finding], *, candidate: str, slo: str) -> str:
    """The verdict as a sentence, with the deciding figure against each baseline."""
    against = "; ".join(f"{rival}: {found.describe()}" for rival, found in findings.items())
    figure = next(iter(findings.values())).figure.title if findings else "nothing"
    reason = f"{figure} of {candidate} against {against}" if findings else "no colocated baseline"
    return f"{word}, for {slo}: {reason}"


def _effects(figure: Figure, pairs: Pairs) -> list[float]:
    """One per pair that both runs have a figure for."""
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    if figure.is_difference:
        return differences([a for a, _ in whole], [b for _, b in whole])
    positive = [(a, b) for a, b in whole if a > 0 and b > 0]
    return log_ratios([a for a, _ in positive], [b for _, b in positive])
