"""What users send, as often as a plan wants to ask: a workload for each rate and seed.

    MadeUp     drawn lengths and gaps
    Recorded   a stretch of a trace that begins anywhere, its gaps scaled to the rate

Equal seeds ask every cluster the same, so that their difference is the clusters'.
"""

import math
import random
from dataclasses import dataclass, replace
from typing import Protocol

from bench.arrivals import arrival_times, make_workload
from bench.lengths import Lengths
from bench.workload import Workload


class Demand(Protocol):
    def workload(self, *, rate_per_s: float, seed: int) -> Workload:
        """From 0 s on, long enough to tell how a cluster takes this rate."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUp:
    """Lengths are drawn; gaps have a deviation of cv of their mean: 0 constant, 1 Poisson.

    num_requests at least, and as many more as min_duration_s takes.
    """

    num_input: Lengths
    num_output: Lengths
    num_requests: int
    min_duration_s: float = 0.0
    cv: float = 1.0

    def workload(self, *, rate_per_s: float, seed: int) -> Workload:
        return make_workload(
            arrival_times(rate_per_s, cv=self.cv, seed=seed),
            num_input=self.num_input,
            num_output=self.num_output,
            num_requests=_how_many(self.num_requests, self.min_duration_s, rate_per_s),
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A trace's arrivals in a row, as many as MadeUp would make; past its end it begins again,
    but none comes twice."""

    trace: Workload
    num_requests: int
    min_duration_s: float = 0.0

    def __post_init__(self) -> None:
        if self.trace.rate_per_s <= 0:
            raise ValueError(f"{self.trace.name}: its requests have no times to scale")

    def workload(self, *, rate_per_s: float, seed: int) -> Workload:
        arrivals = self.trace.arrivals
        mean_gap_s = 1 / self.trace.rate_per_s
        first = random.Random(seed).randrange(len(arrivals))
        at_s = 0.0
        taken = []
        how_many = _how_many(self.num_requests, self.min_duration_s, rate_per_s)
        for offset in range(min(how_many, len(arrivals))):
            index = (first + offset) % len(arrivals)
            if offset:
                gap_s = arrivals[index].at_s - arrivals[index - 1].at_s if index else mean_gap_s
                at_s += gap_s
            taken.append((at_s, arrivals[index]))
        # The stretch's own rate, not the trace's, becomes the one that is asked for.
        stretch = (replace(arrival, at_s=at_s) for at_s, arrival in taken)
        return Workload(name=self.trace.name, arrivals=tuple(stretch)).at_rate(rate_per_s)


def _how_many(num_requests: int, min_duration_s: float, rate_per_s: float) -> int:
    """Few requests at a high rate would be over before a queue can build up."""
    return max(num_requests, math.ceil(min_duration_s * rate_per_s))
