"""How sure a mean over a few pairs of runs is: bootstrap intervals.

    figures of runs measured in turns (A1 B1, B2 A2, ...)
      --log_ratios / differences--> one effect per pair: drift that both share has gone
      --mean_interval--> its mean and the interval that resampled pairs give

Only pairs are resampled, never the requests within a run: what a run's requests scatter by is in
the pairs' scatter already, and requests of one run are not independent of each other. Plain
percentiles of the bootstrap are too narrow for ten pairs, by sqrt((n - 1) / n) and by Student's t
against the normal distribution; the percentiles are moved out by both (Hesterberg 2015, "What
teachers should know about the bootstrap", expanded percentile intervals). The same seed gives the
same interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean, and where it would lie in other pairs like these."""

    mean: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far from 0 either end lies, whichever lies farther."""
        return max(abs(self.low), abs(self.high))


def log_ratios(candidate: Sequence[float], rival: Sequence[float]) -> list[float]:
    """log(candidate / rival) per pair; both above 0."""
    return [math.log(a / b) for a, b in zip(candidate, rival, strict=True)]


def differences(candidate: Sequence[float], rival: Sequence[float]) -> list[float]:
    """candidate - rival per pair."""
    return [a - b for a, b in zip(candidate, rival, strict=True)]


def mean_interval(
    effects: Sequence[float],
    *,
    seed: int,
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:
    """The mean effect and its expanded percentile interval. Raises ValueError for fewer than 2."""
    values = np.asarray(effects, dtype=float)
    if len(values) < 2:
        raise ValueError(f"{len(values)} pairs have no interval")
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(values), size=(num_resamples, len(values)))
    means = values[picks].mean(axis=1)
    tail = expanded_tail(len(values), confidence=confidence)
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean=float(values.mean()), low=float(low), high=float(high))


def expanded_tail(num_values: int, *, confidence: float) -> float:
    """The share of resampled means to cut off at each end for an interval of this confidence."""
    widening = math.sqrt(num_values / (num_values - 1))
    return NormalDist().cdf(-widening * student_t((1 + confidence) / 2, num_values - 1))


def student_t(probability: float, num_free: int) -> float:
    """Quantile of Student's t: Cornish and Fisher's series, within 1 % from 4 degrees on."""
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * num_free)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * num_free**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * num_free**3)
    )
