"""Requests that wait for a pair, in fair order, without holding anything.

    pair() --> FairLine --(next in line, room somewhere)--> Claim on the pair's nodes

The others wait behind the next one, so that a large request is not passed for ever by small ones. A
request that comes back (its decode node refused, a node was lost, it was preempted) has its old
place. Bounded in requests and in tokens. Runs on the event loop.
"""

import asyncio
import itertools
from collections.abc import Mapping

from coordinator.fair_line import FairLine, Place
from coordinator.pairing import Need, Pair, blocks_now, choose_pair
from coordinator.registry import NodeEntry, Registry
from protos.errors import Reason, ServingError

MAX_WAITING = 1024
MAX_WAITING_TOKENS = 4_000_000


class Claim:
    """What a request holds of its pair that the nodes' own statuses do not tell yet."""

    def __init__(self, pair: Pair, need: Need, registry: Registry) -> None:
        self.pair = pair
        self._need = need
        self._registry = registry
        self._holds_decode = pair.decode is not None
        self._holds_prefill = pair.prefill is not None
        self._count(1, decode=self._holds_decode, prefill=self._holds_prefill)
        computes = pair.prefill or pair.decode
        assert computes is not None
        computes.unseen_tokens += need.num_prompt_tokens

    def let_go(self, *, decode: bool = False, prefill: bool = False) -> None:
        """The decode node has answered; the prefill call has ended. Each counts once."""
        decode, prefill = decode and self._holds_decode, prefill and self._holds_prefill
        self._holds_decode &= not decode
        self._holds_prefill &= not prefill
        self._count(-1, decode=decode, prefill=prefill)
        if decode or prefill:
            self._registry.changed()

    def avoid(self, node: NodeEntry) -> None:
        """The node did not answer as a node should."""
        self._registry.avoid(node)

    def _count(self, sign: int, *, decode: bool, prefill: bool) -> None:
        node, need = self.pair.decode, self._need
        if decode and node is not None:
            node.num_held += sign * need.num_choices
            node.held_blocks += sign * blocks_now(node, need)
        if prefill and self.pair.prefill is not None:
            self.pair.prefill.num_outstanding += sign


class PairingQueue:
    """One line for all requests of this coordinator. weights are shares of tenants; may_be_local
    allows prefill on a decode node where there are prefill nodes."""

    def __init__(
        self,
        registry: Registry,
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_tokens: int = MAX_WAITING_TOKENS,
        weights: Mapping[str, float] | None = None,
        may_be_local: bool = True,
    ) -> None:
        self._registry = registry
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._may_be_local = may_be_local
        self._arrivals = itertools.count()
        self._line: FairLine[tuple[Need, asyncio.Future[Claim]]] = FairLine(weights=weights)
        registry.listen(self._pair_next)

    def __len__(self) -> int:
        return len(self._line)

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

    def admit(self, place: Place, need: Need, *, remaining_s: float) -> None:
        """Refuses a new request that there is no room for, or no time. Raises ServingError."""
        if len(self._line) >= self._max_waiting:
            raise self._full(f"{len(self._line)} requests are waiting", self._max_waiting)
        # Alone it may be larger than the limit: to come again later would not help it.
        if self._line and self._line.num_tokens + place.num_tokens > self._max_waiting_tokens:
            raise self._full(
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
        usable = [node for node in self._registry.nodes.values() if node.is_usable]
        workers = [node for node in usable if node.is_prefill] or usable
        if not workers:
            return 0.0
        token_ms = min(node.profile.prefill_token_ms for node in workers)
        ahead_ms = min(node.ahead_ms for node in workers)
        # Output tokens of those ahead are decoded beside, and cost this request nothing.
        waiting_ms = self._prompt_tokens_ahead(place) * token_ms / len(workers)
        return (ahead_ms + waiting_ms + need.num_prompt_tokens * token_ms) / 1e3

    async def pair(self, place: Place, need: Need) -> Claim:
        """Waits for the turn and for room; the caller has the deadline. Raises ServingError."""
        claim: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()
        self._line.add(place, (need, claim))
        self._pair_next()
        try:
            return await claim
        except asyncio.CancelledError:
            if place in self._line:
                self._line.leave(place)
                self._pair_next()
            elif not claim.cancelled() and claim.exception() is None:
                claim.result().let_go(decode=True, prefill=True)
            raise

    def _prompt_tokens_ahead(self, place: Place) -> int:
        return sum(
            need.num_prompt_tokens
            for other, (need, _) in self._line.items()
            if other.priority >= place.priority
        )

    def _pair_next(self) -> None:
        """Pairs from the head of the line for as long as there is room."""
        while (first := self._line.first()) is not None:
            place, (need, claim) = first
            if claim.done():
                # Cancelled, which its coroutine has yet to hear: it takes and pays nothing.
                self._line.leave(place)
                continue
            try:
                pair = choose_pair(self._nodes(), need, may_be_local=self._may_be_local)
            except ServingError as error:
                self._line.leave(place)
                claim.set_exception(error)
                continue
            if pair is None:
                return
            self._line.take(place)
            claim.set_result(Claim(pair, need, self._registry))

    def _nodes(self) -> list[NodeEntry]:
        return list(self._registry.nodes.values())

    def _full(self, message: str, limit: int) -> ServingError:
        return ServingError(Reason.QUEUE_FULL, message, retry_after_s=1.0, limit=limit)
