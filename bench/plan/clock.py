"""Simulated time: callbacks in order of their time. No threads, no asyncio, no real clock.

What happens at one time has an order that does not depend on when it was asked for: steps of nodes
come first, node by node, then everything else, first asked, first done.
"""

import heapq
import itertools
from collections.abc import Callable

_LAST = 1 << 30


class Event:
    """A callback to come; cancelled, it does nothing."""

    __slots__ = ("at_s", "callback")

    def __init__(self, at_s: float, callback: Callable[[], None]) -> None:
        self.at_s = at_s
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Clock:
    """now_s begins at 0 and goes on in run()."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Event]] = []
        self._numbers = itertools.count()

    def at(self, at_s: float, callback: Callable[[], None], *, rank: int = _LAST) -> Event:
        """Calls back at at_s; of what is due then, the lowest rank first."""
        assert at_s >= self.now_s
        event = Event(at_s, callback)
        heapq.heappush(self._heap, (at_s, rank, next(self._numbers), event))
        return event

    def after(self, delay_s: float, callback: Callable[[], None]) -> Event:
        return self.at(self.now_s + delay_s, callback)

    def run(self, *, while_true: Callable[[], bool]) -> None:
        """Until while_true is not, or nothing is left to happen."""
        while self._heap and while_true():
            at_s, _, _, event = heapq.heappop(self._heap)
            if event.callback is not None:
                self.now_s = at_s
                event.callback()
