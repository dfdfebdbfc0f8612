"""Which prefixes a node has, as far as it has told: a set of block hashes, kept by its events.

    CacheEvents --take_in--> {hash, ...} --longest(a prompt's hash chain)--> blocks that are there

A hash stands for the whole prefix that ends with its block, so a set of them is all that a lookup
needs. A hint only: what is evicted now is heard of later, and the node's own lookup is the truth.
Pure; on the coordinator's event loop.
"""

from collections.abc import Collection, Sequence


class PrefixIndex:
    """Of one node. It never holds more than max_hashes, the node's number of blocks: a node that
    tells of more has lost count, and is asked to begin again."""

    def __init__(self, *, max_hashes: int) -> None:
        self._hashes: set[int] = set()
        self._max_hashes = max_hashes
        # None: waits for a snapshot, and hears nothing else.
        self._next_seq: int | None = None

    def __len__(self) -> int:
        return len(self._hashes)

    def take_in(
        self,
        *,
        seq: int,
        added: Collection[int],
        evicted: Collection[int] = (),
        is_snapshot: bool = False,
    ) -> bool:
        """Events from number seq on. False if some were missed: nothing is known any more, and
        the node must send a snapshot. Told once; what comes until then is passed over."""
        if is_snapshot:
            self._hashes.clear()
        elif self._next_seq is None:
            return True
        elif seq != self._next_seq:
            return self._forget()
        self._hashes.difference_update(evicted)
        self._hashes.update(added)
        self._next_seq = seq + len(added) + len(evicted)
        return len(self._hashes) <= self._max_hashes or self._forget()

    def longest(self, chain: Sequence[int]) -> int:
        """How many leading blocks of a hash chain are there.

        Found by bisection: nodes evict the end of a prefix before its beginning, so that what is
        there of a chain is a beginning of it.
        """
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self._hashes:
                low = middle + 1
            else:
                high = middle
        return low

    def _forget(self) -> bool:
        self._hashes.clear()
        self._next_seq = None
        return False
