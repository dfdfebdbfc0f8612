"""Who waits for a pair, who is refused a place, and who is paired next: decisions without a clock.

    admit (or refuse) --> add --> [ FairLine ] --> pair_first: the head, when nodes have room for it

The others wait behind the head, so that a large request is not passed for ever by small ones. Pure
state: the coordinator's queue wraps it in futures (coordinator/queue.py), the planner in simulated
time.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from coordinator.able import check_served
from coordinator.fair_line import FairLine, Place
from coordinator.need import Need
from coordinator.offers import cached_tokens
from coordinator.pairing import Pair, choose_pair
from coordinator.registry import NodeEntry
from protos.errors import Reason, ServingError

MAX_WAITING = 1024
MAX_WAITING_TOKENS = 4_000_000

T = TypeVar("T")


class WaitingLine(Generic[T]):
    """Needs and their owners' items at their places; bounded in requests and in tokens.

    nodes tells of all registered nodes. weights are shares of tenants; may_be_local allows prefill
    on a decode node where there are prefill nodes.
    """

    def __init__(
        self,
        nodes: Callable[[], Sequence[NodeEntry]],
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_tokens: int = MAX_WAITING_TOKENS,
        weights: Mapping[str, float] | None = None,
        may_be_local: bool = True,
    ) -> None:
        self._nodes = nodes
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._may_be_local = may_be_local
        self._arrivals = itertools.count()
        self._line: FairLine[tuple[Need, T]] = FairLine(weights=weights)

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, place: Place) -> bool:
        return place in self._line

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, at most, of those that wait."""
        return self._line.num_tokens

    def place(self, need: Need, *, priority: int = 0, tenant: str = "") -> Place:
        """A place in line for a request that arrives now."""
        return Place(
            arrival=next(self._arrivals),
            priority=priority,
            tenant=tenant,
            num_tokens=need.num_tokens,
        )

    def check_served(self, need: Need) -> None:
        """Refuses a new request that nobody is there for: who waits already is waited with."""
        check_served(self._nodes(), need)

    def admit(self, place: Place, need: Need, *, remaining_s: float) -> None:
        """Refuses a new request that there is no room for, or no time. Raises ServingError."""
        if len(self._line) >= self._max_waiting:
            raise _full(f"{len(self._line)} requests are waiting", self._max_waiting)
        # Alone it may be larger than the limit: to come again later would not help it.
        if self._line and self._line.num_tokens + place.num_tokens > self._max_waiting_tokens:
            raise _full(
                f"{self._line.num_tokens} tokens are waiting, {place.num_tokens} more exceed the "
                f"limit of {self._max_waiting_tokens}",
                self._max_waiting_tokens,
            )
        predicted_s = self.predicted_first_token_s(place, need)
        if predicted_s > remaining_s:
            raise ServingError(
                Reason.DEADLINE_UNREACHABLE,
                f"the first token is predicted in {predicted_s:.3f} s, the deadline is in "
                f"{remaining_s:.3f} s",
                retry_after_s=predicted_s - remaining_s,
                predicted_s=f"{predicted_s:.3f}",
                remaining_s=f"{remaining_s:.3f}",
            )

    def predicted_first_token_s(self, place: Place, need: Need) -> float:
        """From the nodes' cost profiles and what is ahead; 0 while no node is known."""
        usable = [node for node in self._nodes() if node.is_usable]
        workers = [node for node in usable if node.is_prefill] or usable
        if not workers:
            return 0.0
        token_ms = min(node.profile.prefill_token_ms for node in workers)
        ahead_ms = min(node.ahead_ms for node in workers)
        num_cached = max(cached_tokens(node, need) for node in workers)
        own_ms = (need.num_prompt_tokens - num_cached) * token_ms
        # Output tokens of those ahead are decoded beside, and cost this request nothing.
        waiting_ms = self._prompt_tokens_ahead(place) * token_ms / len(workers)
        return (ahead_ms + waiting_ms + own_ms) / 1e3

    def add(self, place: Place, need: Need, item: T) -> None:
        self._line.add(place, (need, item))

    def leave(self, place: Place) -> None:
        """It does not wait any more, and nobody pays."""
        self._line.leave(place)

    def first(self) -> tuple[Place, Need, T] | None:
        """Who is next; None if nobody waits."""
        first = self._line.first()
        if first is None:
            return None
        place, (need, item) = first
        return place, need, item

    def pair_first(self) -> Pair | None:
        """Takes the one that is next out of the line if nodes have room for it, else None.

        Raises ServingError, and it is out of the line too, when no node could ever serve it.
        """
        first = self._line.first()
        assert first is not None
        place, (need, _) = first
        try:
            pair = choose_pair(self._nodes(), need, may_be_local=self._may_be_local)
        except ServingError:
            self._line.leave(place)
            raise
        if pair is not None:
            self._line.take(place)
        return pair

    def _prompt_tokens_ahead(self, place: Place) -> int:
        return sum(
            need.num_prompt_tokens
            for other, (need, _) in self._line.items()
            if other.priority >= place.priority
        )


def _full(message: str, limit: int) -> ServingError:
    return ServingError(Reason.QUEUE_FULL, message, retry_after_s=1.0, limit=limit)
