"""Whether a request may have blocks now: one lease per request, at most max_running requests.

    take(num_blocks, headroom=True)    a decode node: beside those that run and will grow
    take(num_blocks)                   a prefill node: its requests take turns, and do not grow

With the hash chain of its prompt, a request begins with the blocks that are cached of it.

Pure state: the node's Admission waits and gives back around it, the planner in simulated time.
"""

from collections.abc import Sequence

from kvtransfer.blocks import BlockPool, Lease


class NodeFull(Exception):
    """max_running requests are here already."""


class Room:
    """Owner of all leases that requests brought to a node."""

    def __init__(self, pool: BlockPool, *, max_running: int) -> None:
        self._pool = pool
        self._max_running = max_running
        self.num_running = 0

    def take(
        self, num_blocks: int, *, headroom: bool = False, prefix: Sequence[bytes] = ()
    ) -> Lease:
        """A lease, to be given back. Raises NodeFull, BlocksExhausted.

        With headroom, a block is left over for each request that runs already and will grow.
        """
        if self.num_running >= self._max_running:
            raise NodeFull(f"{self._max_running} requests are running")
        spare = min(self.num_running, self._pool.num_blocks - num_blocks) if headroom else 0
        lease = self._pool.reserve(num_blocks, prefix=prefix, spare=max(0, spare))
        self.num_running += 1
        return lease

    def give_back(self, lease: Lease) -> None:
        self.num_running -= 1
        self._pool.release(lease)
