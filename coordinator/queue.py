"""Requests that wait for a pair, in fair order, without holding anything.

    pair() --> WaitingLine --(next in line, room somewhere)--> Claim on the pair's nodes

A request that comes back (its decode node refused, a node was lost, it was preempted) has its old
place. Who is next, and who is refused, is decided in coordinator/waiting_line.py. Runs on the event
loop.
"""

import asyncio
from collections.abc import Mapping

from coordinator.able import blocks_now
from coordinator.fair_line import Place
from coordinator.need import Need
from coordinator.pairing import Pair
from coordinator.registry import NodeEntry, Registry
from coordinator.waiting_line import MAX_WAITING, MAX_WAITING_TOKENS, WaitingLine
from protos.errors import ServingError


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
        computes.unseen_tokens += need.num_prompt_tokens - pair.cached_tokens
        registry.given(pair.prefill, pair.decode)

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
        self._line: WaitingLine[asyncio.Future[Claim]] = WaitingLine(
            lambda: list(registry.nodes.values()),
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            weights=weights,
            may_be_local=may_be_local,
        )
        registry.listen(self._pair_next)

    def __len__(self) -> int:
        return len(self._line)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, at most, of those that wait."""
        return self._line.num_tokens

    def place(self, need: Need, *, priority: int = 0, tenant: str = "") -> Place:
        """A place in line for a request that arrives now."""
        return self._line.place(need, priority=priority, tenant=tenant)

    def check_served(self, need: Need) -> None:
        """Raises ServingError (NO_NODES) for a new request that nobody is there for."""
        self._line.check_served(need)

    def admit(self, place: Place, need: Need, *, remaining_s: float) -> None:
        """Refuses a new request that there is no room for, or no time. Raises ServingError."""
        self._line.admit(place, need, remaining_s=remaining_s)

    def predicted_first_token_s(self, place: Place, need: Need) -> float:
        """From the nodes' cost profiles and what is ahead; 0 while no node is known."""
        return self._line.predicted_first_token_s(place, need)

    async def pair(self, place: Place, need: Need) -> Claim:
        """Waits for the turn and for room; the caller has the deadline. Raises ServingError."""
        claim: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()
        self._line.add(place, need, claim)
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

    def _pair_next(self) -> None:
        """Pairs from the head of the line for as long as there is room."""
        while (first := self._line.first()) is not None:
            place, need, claim = first
            if claim.done():
                # Cancelled, which its coroutine has yet to hear: it takes and pays nothing.
                self._line.leave(place)
                continue
            try:
                pair = self._line.pair_first()
            except ServingError as error:
                claim.set_exception(error)
                continue
            if pair is None:
                return
            claim.set_result(Claim(pair, need, self._registry))
