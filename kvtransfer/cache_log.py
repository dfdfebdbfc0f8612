"""What came into a prefix cache and what left it, for those who keep an index of it.

    add(hash) / evict(hash) --> bounded log --> since(seq): net changes, or None: take a snapshot

Every reader has a place of its own in the log: the seq that its last changes ended with. Pure; the
pool keeps it under its lock.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from kvtransfer.prefix import short_hash

MAX_LOGGED = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """Short hashes. None is in both: take evicted out first, then added in, and the set never
    holds more than there are blocks. next_seq is where the changes after these begin."""

    next_seq: int
    added: tuple[int, ...]
    evicted: tuple[int, ...]


class CacheLog:
    def __init__(self, *, max_logged: int = MAX_LOGGED) -> None:
        self._log: deque[tuple[int, bool]] = deque(maxlen=max_logged)
        self._next_seq = 0

    def add(self, block_hash: bytes) -> None:
        self._append(block_hash, True)

    def evict(self, block_hash: bytes) -> None:
        self._append(block_hash, False)

    def since(self, seq: int) -> CacheChanges | None:
        """What changed from seq on. None where the log does not reach back so far."""
        num_new = self._next_seq - seq
        if not 0 <= num_new <= len(self._log):
            return None
        # The newest of each hash first: it alone counts.
        newest: dict[int, bool] = {}
        for key, is_there in islice(reversed(self._log), num_new):
            newest.setdefault(key, is_there)
        return CacheChanges(
            next_seq=self._next_seq,
            added=tuple(key for key, is_there in newest.items() if is_there),
            evicted=tuple(key for key, is_there in newest.items() if not is_there),
        )

    def snapshot(self, cached: Iterable[bytes]) -> CacheChanges:
        """Everything, as changes of an empty set."""
        added = tuple(map(short_hash, cached))
        return CacheChanges(next_seq=self._next_seq, added=added, evicted=())

    def _append(self, block_hash: bytes, is_there: bool) -> None:
        self._log.append((short_hash(block_hash), is_there))
        self._next_seq += 1
