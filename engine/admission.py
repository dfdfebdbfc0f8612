"""Who may use this node's blocks now: one lease per request, at most max_running requests.

A decode node refuses what does not fit (reserve); a prefill node lets requests wait in order of
arrival (reserve_in_turn), so that a long prompt is not starved by short ones. What fits is decided
in engine/room.py. Runs on the loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from engine.room import NodeFull, Room
from kvtransfer.blocks import BlockPool, BlocksExhausted, Lease


class Admission:
    """Lets requests into a node's room. on_change is called when a request came or went."""

    def __init__(self, pool: BlockPool, *, max_running: int, on_change: Callable[[], None]) -> None:
        self._room = Room(pool, max_running=max_running)
        self._on_change = on_change
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self.num_queued = 0

    @property
    def num_running(self) -> int:
        return self._room.num_running

    def blocks_came_free(self) -> None:
        self._freed.set()
        self._on_change()

    @contextmanager
    def reserve(
        self, num_blocks: int, *, headroom: bool = False, prefix: Sequence[bytes] = ()
    ) -> Iterator[Lease]:
        """A lease for the time of the block. Raises NodeFull, BlocksExhausted.

        With headroom, a block is left over for each request that runs already and will grow.
        prefix is the hash chain of what may be found in the cache.
        """
        lease = self._take(num_blocks, headroom=headroom, prefix=prefix)
        try:
            yield lease
        finally:
            self._give_back(lease)

    @asynccontextmanager
    async def reserve_in_turn(
        self, num_blocks: int, *, prefix: Sequence[bytes] = ()
    ) -> AsyncIterator[Lease]:
        """Like reserve, after waiting for room; the caller's call has the deadline."""
        self.num_queued += 1
        self._on_change()
        try:
            async with self._turn:
                lease = await self._take_when_free(num_blocks, prefix)
        finally:
            self.num_queued -= 1
            self._freed.set()
        try:
            yield lease
        finally:
            self._give_back(lease)

    async def wait_idle(self) -> None:
        """Returns when no request is here."""
        while self.num_running or self.num_queued:
            self._freed.clear()
            await self._freed.wait()

    async def _take_when_free(self, num_blocks: int, prefix: Sequence[bytes]) -> Lease:
        while True:
            self._freed.clear()
            try:
                return self._take(num_blocks, prefix=prefix)
            except (NodeFull, BlocksExhausted):
                await self._freed.wait()

    def _take(
        self, num_blocks: int, *, headroom: bool = False, prefix: Sequence[bytes] = ()
    ) -> Lease:
        lease = self._room.take(num_blocks, headroom=headroom, prefix=prefix)
        self._on_change()
        return lease

    def _give_back(self, lease: Lease) -> None:
        self._room.give_back(lease)
        self.blocks_came_free()
