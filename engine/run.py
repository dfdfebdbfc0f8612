"""One request's sequences in the engine, as its servicer sees them.

    async with engine.run() as run:
        run.start(spec, lease)
        while ...: for progress in await run.next()

A run has one sequence, or one per choice. What happens to any of them comes out of next(). Lives on
the event loop; the engine thread tells it through the loop.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.scheduler import Progress, Running
from engine.sequence import GenerationSpec
from kvtransfer.blocks import Lease
from kvtransfer.prefix import PrefixChain

if TYPE_CHECKING:
    from engine.loop import Engine


class StepFailed(Exception):
    """The executor failed; what it was computing is lost."""


class Preempted(Exception):
    """The sequence's blocks were needed for an older one; what it has generated is valid."""


class Run:
    """One request's sequences in the engine, and what becomes of them, step by step."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._keys: list[int] = []
        self._events: asyncio.Queue[RunEvent] = asyncio.Queue()
        self._failure: StepFailed | Preempted | None = None

    def start(
        self,
        spec: GenerationSpec,
        lease: Lease,
        *,
        block_ids: Sequence[int] | None = None,
        token_ids: Sequence[int] | None = None,
        num_computed: int = 0,
        max_new_tokens: int | None = None,
        copy_from: int | None = None,
        chain: PrefixChain | None = None,
    ) -> int:
        """Computes spec in blocks of the lease, from num_computed tokens whose KV is there.

        block_ids (default: the lease's) are in the order of tokens; full ones that are computed may
        be shared between choices. A choice that goes on from another's prompt has a copy of the
        block that is not full: copy_from. token_ids (default: the spec's) may hold tokens that
        another node has drawn. chain, from here on the engine's, makes full blocks findable by
        their prefix. Returns the key that is in its Progress.
        """
        sequence = Running(
            key=self._engine.next_key(),
            spec=spec,
            block_table=list(lease.block_ids if block_ids is None else block_ids),
            token_ids=list(spec.token_ids if token_ids is None else token_ids),
            num_computed=num_computed,
            max_new_tokens=max_new_tokens or spec.stop.max_tokens,
            arrived_s=time.monotonic() - spec.age_s,
        )
        self._keys.append(sequence.key)
        self._engine.add(sequence, lease, self, copy_from=copy_from, chain=chain)
        return sequence.key

    def put(self, event: "RunEvent") -> None:
        self._events.put_nowait(event)

    async def next(self) -> list[Progress]:
        """All progress since the last call, at least one. Raises StepFailed, Preempted."""
        if self._failure is not None:
            raise self._failure
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        progress = [event for event in events if isinstance(event, Progress)]
        self._failure = next((event for event in events if not isinstance(event, Progress)), None)
        if not progress and self._failure is not None:
            raise self._failure
        return progress

    def close(self) -> None:
        """Takes what still runs out of the engine."""
        for key in self._keys:
            self._engine.remove(key)


RunEvent = Progress | StepFailed | Preempted
