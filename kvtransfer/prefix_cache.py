"""Which block holds which prefix, and who of those that nobody uses goes first.

    publish(hash) --> entry --nobody holds its block--> idle, in line --evict--> gone
                        ^------------- a hit ----------------+

The hashes form trees, one block's prefix being its parent's and more. An entry goes before its
parent, so that what is here of a chain is always a beginning of it. That takes no search: a block
comes idle before its parent does, so children stand before parents in line of last use. Where
a parent comes to the front while somebody still holds a child, which happens to blocks that were
computed twice, the child is forgotten with it: idle blocks are always to be had.

Pure; the pool keeps it under its lock. All of it is O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.cache_log import CacheChanges, CacheLog


@dataclass(slots=True, eq=False)
class Entry:
    """block holds the prefix that hash stands for."""

    hash: bytes
    block: int
    parent: "Entry | None"
    children: set["Entry"] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounts:
    """Since the node began: leases that looked a prefix up, its blocks, how many of them were
    found, and how many were lost to make place."""

    num_lookups: int
    num_looked_up_blocks: int
    num_hit_blocks: int
    num_evicted_blocks: int


class PrefixCache:
    """Entries by hash, and the idle ones in order of last use."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._idle: OrderedDict[Entry, None] = OrderedDict()
        self._log = CacheLog()
        self._num_lookups = self._num_looked_up = self._num_hits = self._num_evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, block_hash: bytes) -> Entry | None:
        return self._entries.get(block_hash)

    def longest(self, chain: Sequence[bytes]) -> list[Entry]:
        """Entries of the chain's beginning, as far as it is here."""
        found = []
        for block_hash in chain:
            entry = self._entries.get(block_hash)
            if entry is None:
                break
            found.append(entry)
        return found

    def add(self, block_hash: bytes, *, block: int, parent: Entry | None) -> Entry:
        """A new entry, whose block somebody holds."""
        assert block_hash not in self._entries
        entry = Entry(block_hash, block, parent)
        self._entries[block_hash] = entry
        if parent is not None:
            parent.children.add(entry)
        self._log.add(block_hash)
        return entry

    def now_idle(self, entry: Entry) -> None:
        """Nobody holds the block any more; it is the last in line, but for its parents."""
        above: Entry | None = entry
        self._idle[entry] = None
        while above is not None and above in self._idle:
            self._idle.move_to_end(above)
            above = above.parent

    def now_held(self, entry: Entry) -> None:
        self._idle.pop(entry, None)

    def evict(self) -> list[Entry]:
        """Forgets the first idle entry in line, and what goes on from it. Returns them."""
        gone = self._forget(next(iter(self._idle)))
        self._num_evicted += len(gone)
        return gone

    def clear(self) -> list[Entry]:
        """Forgets everything. Returns it."""
        roots = [entry for entry in self._entries.values() if entry.parent is None]
        return [gone for root in roots for gone in self._forget(root)]

    def since(self, seq: int) -> CacheChanges | None:
        return self._log.since(seq)

    def snapshot(self) -> CacheChanges:
        return self._log.snapshot(self._entries)

    def count_lookup(self, *, num_blocks: int, num_hits: int) -> None:
        """A lease began with num_hits of the num_blocks that it might have."""
        self._num_lookups += 1
        self._num_looked_up += num_blocks
        self._num_hits += num_hits

    def counts(self) -> CacheCounts:
        return CacheCounts(
            num_lookups=self._num_lookups,
            num_looked_up_blocks=self._num_looked_up,
            num_hit_blocks=self._num_hits,
            num_evicted_blocks=self._num_evicted,
        )

    def _forget(self, top: Entry) -> list[Entry]:
        """top and all below it."""
        if top.parent is not None:
            top.parent.children.discard(top)
        gone = [top]
        for entry in gone:
            gone.extend(entry.children)
            del self._entries[entry.hash]
            self._idle.pop(entry, None)
            self._log.evict(entry.hash)
        return gone
