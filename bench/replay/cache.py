"""One cache for all, to compare with: what was used longest ago goes first, leaves first.

A use of a prefix touches its blocks from the last to the first, so that a block is never older than
what follows it, and the oldest one is a leaf.
"""

from collections import OrderedDict
from collections.abc import Sequence


class LeafLru:
    """At most capacity blocks."""

    def __init__(self, capacity: int) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._capacity = capacity

    def longest(self, chain: Sequence[bytes]) -> int:
        """Leading blocks of the chain that are there."""
        for index, block in enumerate(chain):
            if block not in self._blocks:
                return index
        return len(chain)

    def use(self, chain: Sequence[bytes]) -> None:
        """All of the chain is there now, as far as it fits."""
        for block in reversed(chain[: self._capacity]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
