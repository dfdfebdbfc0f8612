"""What the command line asks for, as a workload at any rate.

    Recipe(lengths or trace, how fast, how much) --workload()--> Workload

A trace is sampled, shortened and sped up, in this order, and cut last. A rate that is given
replaces a trace's own, whose bursts stay; prompts without times come like made-up arrivals.
"""

import math
import random
from dataclasses import dataclass, replace

from bench.arrivals import arrival_times, make_workload, retimed
from bench.lengths import Lengths
from bench.traces import has_times
from bench.workload import Workload

# TTFT bounds that a run of a search for goodput lasts at least.
MIN_TTFTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """rate_per_s None: the trace's own times. cv is of made-up arrivals: 0 constant, 1 Poisson.

    num_requests at most, but as many more as min_duration_s takes at the rate.
    """

    num_input: Lengths
    num_output: Lengths
    trace: Workload | None = None
    rate_per_s: float | None = None
    cv: float = 1.0
    num_requests: int | None = None
    duration_s: float | None = None
    min_duration_s: float = 0.0
    sample: float = 1.0
    speed: float = 1.0
    length_scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None
    seed: int = 0

    def at_rate(self, rate_per_s: float) -> "Recipe":
        return replace(self, rate_per_s=rate_per_s)

    def for_search(self, *, ttft_ms: float) -> "Recipe":
        """Long enough at any rate: in less, no queue would grow past the bound."""
        return replace(self, min_duration_s=MIN_TTFTS * ttft_ms / 1e3)

    def workload(self) -> Workload:
        """Raises ValueError for what cannot be made, or has no requests."""
        made = self._made() if self.trace is None else self._recorded(self.trace)
        made = made.limited(
            max_input=self.max_input, max_output=self.max_output, max_requests=self._how_many()
        )
        if not made.arrivals:
            raise ValueError(f"{made.name}: no request is left of it; take more time, or a higher "
                             "rate or share")  # fmt: skip
        return made

    def _made(self) -> Workload:
        return make_workload(
            arrival_times(self._rate_per_s(), cv=self.cv, seed=self.seed),
            num_input=self.num_input,
            num_output=self.num_output,
            num_requests=self._how_many(),
            duration_s=self.duration_s,
            seed=self.seed,
        )

    def _recorded(self, trace: Workload) -> Workload:
        taken = trace.sampled(self.sample, random.Random(f"{self.seed} sample"))
        if self.length_scale != 1.0:
            taken = taken.lengths_scaled(self.length_scale)
        if not has_times(trace):
            times = arrival_times(self._rate_per_s(), cv=self.cv, seed=self.seed)
            taken = retimed(taken, times)
        elif self.rate_per_s is not None:
            if self.speed != 1.0:
                raise ValueError("a trace has either a rate or a speed")
            taken = taken.at_rate(self.rate_per_s)
        else:
            taken = taken.scaled(self.speed)
        return taken if self.duration_s is None else taken.until(self.duration_s)

    def _how_many(self) -> int | None:
        if self.num_requests is None or self.rate_per_s is None:
            return self.num_requests
        return enough(self.num_requests, self.min_duration_s, self.rate_per_s)

    def _rate_per_s(self) -> float:
        if self.rate_per_s is None:
            raise ValueError("requests that have no times of their own need a rate")
        return self.rate_per_s


def enough(num_requests: int, min_duration_s: float, rate_per_s: float) -> int:
    """Few requests at a high rate would be over before a queue can build up."""
    return max(num_requests, math.ceil(min_duration_s * rate_per_s))
