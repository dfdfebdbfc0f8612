"""Who may use this node's blocks now: one lease per request, at most max_running requests.

A decode node refuses what does not fit (reserve); a prefill node lets requests wait in order of
arrival (reserve_in_turn), so that a long prompt is not starved by short ones. Runs on the loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvtransfer.blocks import BlockPool, BlocksExhausted, Lease


class NodeFull(Exception):
    """max_running requests are here already."""


class Admission:
    """Owner of all leases of a node. on_change is called when a request came or went."""

    def __init__(self, pool: BlockPool, *, max_running: int, on_change: Callable[[], None]) -> None:
        self._pool = pool
        self._max_running = max_running
        self._on_change = on_change
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self.num_running = 0
        self.num_queued = 0

    def blocks_came_free(self) -> None:
        self._freed.set()
        self._on_change()

    @contextmanager
    def reserve(self, num_blocks: int, *, headroom: bool = False) -> Iterator[Lease]:
        """A lease for the time of the block. Raises NodeFull, BlocksExhausted.

        With headroom, a block is left over for each request that runs already and will grow.
        """
        if headroom:
            spare = min(self.num_running, self._pool.num_blocks - num_blocks)
            available = self._pool.counts().available
            if available < num_blocks + spare:
                raise BlocksExhausted(needed=num_blocks + spare, available=available)
        lease = self._take(num_blocks)
        try:
            yield lease
        finally:
            self._give_back(lease)

    @asynccontextmanager
    async def reserve_in_turn(self, num_blocks: int) -> AsyncIterator[Lease]:
        """Like reserve, after waiting for room; the caller's call has the deadline."""
        self.num_queued += 1
        self._on_change()
        try:
            async with self._turn:
                lease = await self._take_when_free(num_blocks)
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

    async def _take_when_free(self, num_blocks: int) -> Lease:
        while True:
            self._freed.clear()
            try:
                return self._take(num_blocks)
            except (NodeFull, BlocksExhausted):
                await self._freed.wait()

    def _take(self, num_blocks: int) -> Lease:
        if self.num_running >= self._max_running:
            raise NodeFull(f"{self._max_running} requests are running")
        lease = self._pool.reserve(num_blocks)
        self.num_running += 1
        self._on_change()
        return lease

    def _give_back(self, lease: Lease) -> None:
        self.num_running -= 1
        self._pool.release(lease)
        self.blocks_came_free()
