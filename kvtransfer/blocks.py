"""Who owns which KV block: the ownership table.

    FREE -> RESERVED -> WRITING(engine | lane) -> SEALED(readers: attention, send) -> FREE
                                                    |  ^                               ^
                                           release, |  | a hit                         | evicted
                                     if published   v  |                               |
                                                   CACHED -----------------------------+

A lease is the right to a set of blocks. Only its holder may write them, one writer at a time, and
a late write through a released lease is refused, so that it cannot reach another request's KV. A
release is immediate for idle blocks and waits, block by block, for open writers and readers.

A sealed full block can be published under the hash of its prefix (kvtransfer/prefix.py). It is
never written again: leases that begin with that prefix share it, and when nobody holds it, it is
kept until its place is needed. So what is available is what is free and what is cached.

Pure Python behind one lock: callable from any thread, no I/O inside. The bytes are in memory.py.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.cache_log import CacheChanges
from kvtransfer.prefix_cache import CacheCounts, Entry, PrefixCache


class BlockState(Enum):
    FREE = "free"
    RESERVED = "reserved"
    WRITING = "writing"
    SEALED = "sealed"
    CACHED = "cached"

    # Looked up at every change of a block; Enum's own hash is Python code. Members are singletons.
    __hash__ = object.__hash__


class BlocksExhausted(Exception):
    """Too few blocks are available right now. needed may become available later."""

    def __init__(self, *, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {available} available")
        self.needed = needed
        self.available = available


class LeaseReleased(Exception):
    """The lease was released: its blocks may belong to somebody else by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A right to block_ids, in the order of the tokens that they hold. id is never used again.

    The first num_cached hold their tokens already and are only read: others may share them.
    """

    id: int
    block_ids: tuple[int, ...]
    num_cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks by state; they always add up to total."""

    free: int
    reserved: int
    writing: int
    sealed: int
    cached: int = 0
    total: int

    @property
    def available(self) -> int:
        return self.free + self.cached


@dataclass(slots=True)
class _Block:
    state: BlockState = BlockState.FREE
    # Leases. Freed, or cached, when the last one, writer and reader has left.
    holders: set[int] = field(default_factory=set)
    writer: str | None = None
    num_readers: int = 0
    # Where it is published.
    entry: Entry | None = None


class BlockPool:
    """The one owner of num_blocks block states. on_free is called, outside the lock, after blocks
    became available."""

    def __init__(self, num_blocks: int, *, on_free: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cache = PrefixCache()
        self._count = dict.fromkeys(BlockState, 0)
        self._count[BlockState.FREE] = num_blocks
        self._next_lease_id = 1
        # Blocks that were ever in use: those before it. Free ones are taken in order.
        self.num_reached = 0
        self._on_free = on_free

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def counts(self) -> BlockCounts:
        with self._lock:
            by_name = {state.value: count for state, count in self._count.items()}
            return BlockCounts(**by_name, total=len(self._blocks))

    def cache_counts(self) -> CacheCounts:
        with self._lock:
            return self._cache.counts()

    def reserve(self, num_blocks: int, *, prefix: Sequence[bytes] = (), spare: int = 0) -> Lease:
        """Takes num_blocks blocks, all or none: those that hold the beginning of the hash chain
        prefix, as far as it is cached, and free ones. Cached ones that nobody uses make place.

        Raises BlocksExhausted, also if fewer than spare would be left over.
        """
        assert len(prefix) <= num_blocks
        with self._lock:
            hits = self._cache.longest(prefix)
            num_idle = sum(self._blocks[hit.block].state is BlockState.CACHED for hit in hits)
            available = len(self._free) + self._count[BlockState.CACHED] - num_idle
            num_fresh = num_blocks - len(hits)
            if available < num_fresh + spare:
                raise BlocksExhausted(needed=num_fresh + spare, available=available)
            lease_id, self._next_lease_id = self._next_lease_id, self._next_lease_id + 1
            for hit in hits:
                self._share(hit, lease_id)
            fresh = tuple(self._take_free(lease_id) for _ in range(num_fresh))
            if prefix:
                self._cache.count_lookup(num_blocks=len(prefix), num_hits=len(hits))
            shared = tuple(hit.block for hit in hits)
            return Lease(id=lease_id, block_ids=shared + fresh, num_cached=len(hits))

    def publish(
        self, block_ids: Iterable[int], hashes: Iterable[bytes], *, parent: bytes | None = None
    ) -> None:
        """Makes blocks that are full, sealed and held by the caller findable: block_ids[i] holds
        what hashes[i] stands for, parent is the hash before the first (None: they are the first).

        A hash that another block has stays with that one. Nothing is published behind a parent
        that is not cached any more.
        """
        with self._lock:
            above = self._cache.find(parent) if parent is not None else None
            if parent is not None and above is None:
                return
            for index, block_hash in zip(block_ids, hashes, strict=True):
                entry = self._cache.find(block_hash)
                if entry is None:
                    block = self._blocks[index]
                    assert block.state is BlockState.SEALED, f"a {block.state.value} block"
                    assert block.entry is None, "a block has one prefix"
                    entry = self._cache.add(block_hash, block=index, parent=above)
                    block.entry = entry
                above = entry

    def clear_cache(self) -> None:
        """Forgets every prefix: cached blocks come free, and those in use when they are let go."""
        with self._lock:
            self._forgotten(self._cache.clear())

    def cache_changes(self, *, since: int) -> CacheChanges | None:
        """What was published and forgotten from seq since on; None if that is too long ago."""
        with self._lock:
            return self._cache.since(since)

    def cache_snapshot(self) -> CacheChanges:
        with self._lock:
            return self._cache.snapshot()

    def begin_write(self, lease: Lease, block_ids: Iterable[int], *, writer: str) -> None:
        """Makes writer the only writer of these blocks of the lease, all or none.

        Raises LeaseReleased. A block that has a writer or readers, or that others may share, is a
        fault of ours.
        """
        with self._lock:
            blocks = self._of_lease(lease, block_ids)
            for block in blocks:
                assert block.writer is None, f"{writer}: block has writer {block.writer}"
                assert block.num_readers == 0, f"{writer}: block has readers"
                assert block.entry is None, f"{writer}: block is published"
                assert len(block.holders) == 1, f"{writer}: block is shared"
            for block in blocks:
                block.writer = writer
                self._set(block, BlockState.WRITING)

    def end_write(self, block_ids: Iterable[int], *, writer: str, then_read: bool = False) -> None:
        """Seals blocks that writer was writing; then_read makes it a reader of them at once."""
        with self._lock:
            left = list(block_ids)
            for index in left:
                block = self._blocks[index]
                assert block.writer == writer, f"{writer}: block has writer {block.writer}"
                block.writer = None
                block.num_readers += then_read
                self._set(block, BlockState.SEALED)
            is_news = self._let_go(left)
        if is_news:
            self._on_free()

    def begin_read(self, lease: Lease, block_ids: Iterable[int]) -> None:
        """Counts a reader in on sealed blocks of the lease. Raises LeaseReleased."""
        with self._lock:
            blocks = self._of_lease(lease, block_ids)
            for block in blocks:
                assert block.state is BlockState.SEALED, f"read of a {block.state.value} block"
            for block in blocks:
                block.num_readers += 1

    def end_read(self, block_ids: Iterable[int]) -> None:
        with self._lock:
            left = list(block_ids)
            for index in left:
                block = self._blocks[index]
                assert block.num_readers > 0, "end_read without begin_read"
                block.num_readers -= 1
            is_news = self._let_go(left)
        if is_news:
            self._on_free()

    def release(self, lease: Lease) -> None:
        """Gives the blocks back, each as soon as nobody writes, reads or shares it. Idempotent."""
        with self._lock:
            held = [i for i in lease.block_ids if lease.id in self._blocks[i].holders]
            for index in held:
                self._blocks[index].holders.discard(lease.id)
            is_news = self._let_go(held)
        if is_news:
            self._on_free()

    def _of_lease(self, lease: Lease, block_ids: Iterable[int]) -> list[_Block]:
        blocks = [self._blocks[index] for index in block_ids]
        for block in blocks:
            if lease.id not in block.holders:
                raise LeaseReleased(f"lease {lease.id} was released")
        return blocks

    def _set(self, block: _Block, state: BlockState) -> None:
        self._count[block.state] -= 1
        self._count[state] += 1
        block.state = state

    def _share(self, entry: Entry, lease_id: int) -> None:
        block = self._blocks[entry.block]
        block.holders.add(lease_id)
        if block.state is BlockState.CACHED:
            self._cache.now_held(entry)
            self._set(block, BlockState.SEALED)

    def _take_free(self, lease_id: int) -> int:
        if not self._free:
            self._forgotten(self._cache.evict())
        index = self._free.pop()
        self.num_reached = max(self.num_reached, index + 1)
        block = self._blocks[index]
        block.holders.add(lease_id)
        self._set(block, BlockState.RESERVED)
        return index

    def _forgotten(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            block = self._blocks[entry.block]
            block.entry = None
            if block.state is BlockState.CACHED:
                self._set(block, BlockState.FREE)
                self._free.append(entry.block)

    def _let_go(self, block_ids: Sequence[int]) -> bool:
        """Frees or caches those that nobody uses now. The last first: a prefix's end goes idle
        before its beginning."""
        is_news = False
        for index in reversed(block_ids):
            block = self._blocks[index]
            is_idle = block.state in (BlockState.FREE, BlockState.CACHED)
            if is_idle or block.holders or block.writer is not None or block.num_readers:
                continue
            is_news = True
            if block.entry is not None:
                self._set(block, BlockState.CACHED)
                self._cache.now_idle(block.entry)
            else:
                self._set(block, BlockState.FREE)
                self._free.append(index)
        return is_news
