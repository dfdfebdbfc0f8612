"""The highest rate that holds up: by doubling until one does not, then halving the gap.

    Search.rate --measured by whoever--> Search.learn(holds) --> ... --> Search.found

Pure: a live run and a simulation ask the same questions.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

# A rate holds if at least this share of all offered requests meets the SLO.
GOODPUT_ATTAINMENT = 0.9
MAX_DOUBLINGS = 40
MAX_HALVINGS = 8


@dataclass(slots=True, kw_only=True)
class Search:
    """start_per_s is where it begins; tolerance is relative. rate is the next to try, None when
    found is known: 0 where nothing holds that is worth the search."""

    start_per_s: float
    tolerance: float = 0.05
    found: float = 0.0
    _low: float = 0.0
    _high: float | None = None
    _num_steps: int = 0

    @property
    def rate(self) -> float | None:
        if self._high is None:
            return 2 * self._low or self.start_per_s if self._num_steps < MAX_DOUBLINGS else None
        if self._low == 0.0:
            return self._high / 2 if self._num_steps < MAX_HALVINGS else None
        if self._high - self._low > self.tolerance * self._low:
            return (self._low + self._high) / 2
        return None

    def learn(self, holds: bool) -> None:
        """What came of the rate."""
        rate = self.rate
        assert rate is not None, "the search is over"
        self._num_steps += 1
        if holds:
            self._low = self.found = rate
        else:
            if self._high is None:
                self._num_steps = 0
            self._high = rate


def highest_rate(
    holds: Callable[[float], bool], *, start_per_s: float, tolerance: float = 0.05
) -> float:
    search = Search(start_per_s=start_per_s, tolerance=tolerance)
    while (rate := search.rate) is not None:
        search.learn(holds(rate))
    return search.found


async def measure_goodput(
    holds: Callable[[float], Awaitable[bool]], *, start_per_s: float, tolerance: float = 0.05
) -> float:
    search = Search(start_per_s=start_per_s, tolerance=tolerance)
    while (rate := search.rate) is not None:
        search.learn(await holds(rate))
    return search.found
