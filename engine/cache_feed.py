"""What one coordinator is told of this node's prefix cache, in messages of bounded size.

    pool's log --since the last time--> CacheEvents, ...     the beginning, a resync, or a log that
    pool's cache ---------whole-------> CacheEvents, ...     does not reach back: everything again

One per Register stream. Runs on the event loop.
"""

from collections.abc import Iterator

from kvtransfer.blocks import BlockPool
from protos.pd.v1 import cluster_pb2

# Of one message.
MAX_HASHES = 4096


class CacheFeed:
    """Reads pool's cache and numbers what it tells."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # Place in the pool's log; None: tell everything.
        self._since: int | None = None
        self._next_seq = 0

    def restart(self) -> None:
        """The coordinator has lost count: the next messages tell everything."""
        self._since = None

    def messages(self) -> Iterator[cluster_pb2.CacheEvents]:
        """What is new since the last call."""
        changes = None if self._since is None else self._pool.cache_changes(since=self._since)
        is_snapshot = changes is None
        if changes is None:
            changes = self._pool.cache_snapshot()
        self._since = changes.next_seq
        # Evicted first: the coordinator never knows more blocks than the pool has.
        num_evicted, hashes = len(changes.evicted), (*changes.evicted, *changes.added)
        for start in range(0, max(len(hashes), is_snapshot), MAX_HASHES):
            end = min(start + MAX_HASHES, len(hashes))
            yield cluster_pb2.CacheEvents(
                seq=self._next_seq,
                is_snapshot=is_snapshot and start == 0,
                evicted=hashes[start : min(end, num_evicted)],
                added=hashes[max(start, num_evicted) : end],
            )
            self._next_seq += end - start
