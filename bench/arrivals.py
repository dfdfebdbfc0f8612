"""When requests arrive: endless times in seconds, and workloads made of them.

    constant   every 1/rate s
    gamma      independent gaps, gamma distributed; cv is their deviation divided by their mean
               with cv 1 Poisson: nobody knows of anybody

    arrival_times + bench/lengths.py --make_workload--> Workload

A cv above 1 comes in bursts: real traces have 1 to 4. Times and lengths are drawn from generators
of their own, so another rate asks for the same requests.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from bench.lengths import Lengths
from bench.workload import Arrival, Workload


def arrival_times(rate_per_s: float, *, cv: float, seed: int) -> Iterator[float]:
    """Endless; cv 0 is constant, 1 is Poisson. The first is a gap after 0. Raises ValueError."""
    if rate_per_s <= 0 or cv < 0:
        raise ValueError(f"arrivals need a rate above 0 and a cv of 0 or more: {rate_per_s}, {cv}")
    if cv == 0:
        return constant(rate_per_s)
    return gamma(rate_per_s, cv=cv, rng=_rng(seed, "times"))


def constant(rate_per_s: float) -> Iterator[float]:
    return (number / rate_per_s for number in itertools.count(1))


def gamma(rate_per_s: float, *, cv: float, rng: random.Random) -> Iterator[float]:
    """Mean gap shape x scale = 1/rate; deviation / mean = 1/sqrt(shape) = cv."""
    shape = cv**-2
    scale_s = 1 / (rate_per_s * shape)
    return itertools.accumulate(rng.gammavariate(shape, scale_s) for _ in itertools.count())


def make_workload(
    times: Iterator[float],
    *,
    num_input: Lengths,
    num_output: Lengths,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int,
) -> Workload:
    """Ends before duration_s or after num_requests, whichever is first; needs one of them."""
    if num_requests is None and duration_s is None:
        raise ValueError("a workload needs a number of requests or a duration")
    if duration_s is not None:
        end_s = duration_s
        times = itertools.takewhile(lambda at_s: at_s < end_s, times)
    rng = _rng(seed, "lengths")
    return Workload(
        name=f"{num_input} in, {num_output} out",
        arrivals=tuple(
            Arrival(at_s=at_s, num_input=num_input.draw(rng), num_output=num_output.draw(rng))
            for at_s in itertools.islice(times, num_requests)
        ),
    )


def retimed(workload: Workload, times: Iterator[float]) -> Workload:
    """The same requests in the same order, at other times."""
    pairs = zip(workload.arrivals, times, strict=False)
    return replace(workload, arrivals=tuple(replace(a, at_s=at_s) for a, at_s in pairs))


def _rng(seed: int, what: str) -> random.Random:
    return random.Random(f"{seed} {what}")
