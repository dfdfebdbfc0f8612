"""Prompt tokens that a node was given and has not computed: what pairing predicts its queue by.

Counted from a request's arrival, not from its first step, so that a status tells of it at once.
Runs on the event loop.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Backlog:
    """on_change is called when tokens came or were computed."""

    def __init__(self, *, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.num_tokens = 0

    @contextmanager
    def computing(self, num_tokens: int) -> Iterator[Callable[[int], None]]:
        """Counts a prompt in; the yielded function is told how many of its tokens are computed."""
        left = num_tokens
        self._add(left)

        def computed(num_computed: int) -> None:
            nonlocal left
            still = max(0, num_tokens - num_computed)
            if still < left:
                self._add(still - left)
                left = still

        try:
            yield computed
        finally:
            self._add(-left)

    def _add(self, num_tokens: int) -> None:
        if num_tokens:
            self.num_tokens += num_tokens
            self._on_change()
