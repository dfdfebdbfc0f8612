"""Requests that wait for a pair, in order of arrival, without holding anything.

    pair() --> line --(first in line, room somewhere)--> Claim on the pair's nodes

The others wait behind the first, so that a large request is not passed for ever by small ones. A
request that its decode node refused comes back to its old place. Runs on the event loop.
"""

import asyncio
import bisect
import itertools
from dataclasses import dataclass, field

from coordinator.pairing import Need, Pair, choose_pair
from coordinator.registry import Registry
from protos.errors import Reason, ServingError

MAX_WAITING = 1024


class Claim:
    """What a request holds of its pair that the nodes' own statuses do not tell yet."""

    def __init__(self, pair: Pair, need: Need, registry: Registry) -> None:
        self.pair = pair
        self._need = need
        self._registry = registry
        self._holds_decode = pair.decode is not None
        self._holds_prefill = pair.prefill is not None
        self._count(1, decode=self._holds_decode, prefill=self._holds_prefill)

    def let_go(self, *, decode: bool = False, prefill: bool = False) -> None:
        """The decode node has answered; the prefill call has ended. Each counts once."""
        decode, prefill = decode and self._holds_decode, prefill and self._holds_prefill
        self._holds_decode &= not decode
        self._holds_prefill &= not prefill
        self._count(-1, decode=decode, prefill=prefill)
        if decode or prefill:
            self._registry.changed()

    def _count(self, sign: int, *, decode: bool, prefill: bool) -> None:
        node, need = self.pair.decode, self._need
        if decode and node is not None:
            node.num_held += sign
            node.held_blocks += sign * node.layout.blocks_for(need.max_num_tokens)
        node = self.pair.prefill
        if prefill and node is not None:
            node.num_outstanding += sign
            node.outstanding_tokens += sign * need.num_prompt_tokens


@dataclass(slots=True, order=True)
class _Waiting:
    arrival: int
    need: Need = field(compare=False)
    claim: "asyncio.Future[Claim]" = field(compare=False)


class PairingQueue:
    """One line for all requests of this coordinator."""

    def __init__(self, registry: Registry, *, max_waiting: int = MAX_WAITING) -> None:
        self._registry = registry
        self._max_waiting = max_waiting
        self._arrivals = itertools.count()
        self._line: list[_Waiting] = []
        registry.listen(self._pair_first)

    def __len__(self) -> int:
        return len(self._line)

    def arrival(self) -> int:
        """A place in line."""
        return next(self._arrivals)

    async def pair(self, arrival: int, need: Need) -> Claim:
        """Waits for the turn and for room; the caller has the deadline. Raises ServingError."""
        if len(self._line) >= self._max_waiting:
            raise ServingError(
                Reason.QUEUE_FULL,
                f"{len(self._line)} requests are waiting",
                retry_after_s=1.0,
                limit=self._max_waiting,
            )
        claim: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(arrival, need, claim)
        bisect.insort(self._line, waiting)
        self._pair_first()
        try:
            return await claim
        except asyncio.CancelledError:
            if claim.done() and not claim.cancelled() and claim.exception() is None:
                claim.result().let_go(decode=True, prefill=True)
            raise
        finally:
            if waiting in self._line:
                self._line.remove(waiting)
                self._pair_first()

    def _pair_first(self) -> None:
        """Pairs from the head of the line for as long as there is room."""
        while self._line:
            first = self._line[0]
            try:
                pair = choose_pair(self._registry.nodes.values(), first.need)
            except ServingError as error:
                self._line.pop(0)
                if not first.claim.done():
                    first.claim.set_exception(error)
                continue
            if pair is None:
                return
            self._line.pop(0)
            if not first.claim.done():
                first.claim.set_result(Claim(pair, first.need, self._registry))
