"""Who is next: priority first, then a fair share of tokens for each tenant, then age.

    priority 5:  tenant a  [r1, r4]          deficit round robin: a tenant's turn gives it weight *
                 tenant b  [r2]              QUANTUM tokens of credit; a request costs its tokens
    priority 0:  tenant a  [r3, ...]

So a tenant that floods the line delays others by its turn, not by its flood. Pure state: the
coordinator and the planner run the same object.
"""

import bisect
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# About one long prompt: smaller quanta only turn the wheel more often.
QUANTUM_TOKENS = 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """Where a request stands. arrival orders a tenant's requests and stays when one comes back;
    num_tokens is what it costs its tenant."""

    arrival: int
    priority: int = field(default=0, compare=False)
    tenant: str = field(default="", compare=False)
    num_tokens: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Tenant(Generic[T]):
    """A tenant's requests of one priority, oldest first, and the credit of its turn."""

    places: list[Place] = field(default_factory=list)
    items: dict[Place, T] = field(default_factory=dict)
    credit: float = 0.0


class _Level(Generic[T]):
    """Tenants of one priority; turns[0] has the turn."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, _Tenant[T]] = {}
        self._turns: deque[str] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def __contains__(self, place: Place) -> bool:
        tenant = self._tenants.get(place.tenant)
        return tenant is not None and place in tenant.items

    def add(self, place: Place, item: T) -> None:
        tenant = self._tenants.get(place.tenant)
        if tenant is None:
            tenant = self._tenants[place.tenant] = _Tenant()
            self._turns.append(place.tenant)
            if len(self._turns) == 1:
                self._begin_turn()
        bisect.insort(tenant.places, place)
        tenant.items[place] = item

    def first(self) -> tuple[Place, T]:
        """Asked again, it is the same until something was added or taken."""
        while True:
            tenant = self._tenants[self._turns[0]]
            place = tenant.places[0]
            if tenant.credit >= place.num_tokens:
                return place, tenant.items[place]
            self._turns.rotate(-1)
            self._begin_turn()

    def remove(self, place: Place, *, is_served: bool) -> None:
        tenant = self._tenants[place.tenant]
        tenant.places.remove(place)
        del tenant.items[place]
        if is_served:
            tenant.credit -= place.num_tokens
        if not tenant.places:
            # Credit is for those who wait.
            had_turn = self._turns[0] == place.tenant
            self._turns.remove(place.tenant)
            del self._tenants[place.tenant]
            if had_turn and self._turns:
                self._begin_turn()

    def items(self) -> Iterator[tuple[Place, T]]:
        for tenant in self._tenants.values():
            yield from tenant.items.items()

    def _begin_turn(self) -> None:
        name = self._turns[0]
        self._tenants[name].credit += QUANTUM_TOKENS * self._weights.get(name, 1.0)


class FairLine(Generic[T]):
    """Items at their places. weights are shares of tenants; 1 for who is not named."""

    def __init__(self, *, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._levels: dict[int, _Level[T]] = {}
        self._size = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, place: Place) -> bool:
        level = self._levels.get(place.priority)
        return level is not None and place in level

    def add(self, place: Place, item: T) -> None:
        level = self._levels.get(place.priority)
        if level is None:
            level = self._levels[place.priority] = _Level(self._weights)
        level.add(place, item)
        self._size += 1
        self.num_tokens += place.num_tokens

    def first(self) -> tuple[Place, T] | None:
        """Who is next; None if nobody waits."""
        if not self._levels:
            return None
        return self._levels[max(self._levels)].first()

    def take(self, place: Place) -> None:
        """It is served: its tenant pays for it."""
        self._remove(place, is_served=True)

    def leave(self, place: Place) -> None:
        """It does not wait any more, and nobody pays."""
        self._remove(place, is_served=False)

    def items(self) -> Iterator[tuple[Place, T]]:
        """All that wait, in no order."""
        for level in self._levels.values():
            yield from level.items()

    def _remove(self, place: Place, *, is_served: bool) -> None:
        level = self._levels[place.priority]
        level.remove(place, is_served=is_served)
        if not level:
            del self._levels[place.priority]
        self._size -= 1
        self.num_tokens -= place.num_tokens
