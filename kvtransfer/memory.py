"""The bytes behind the block pool, on the host.

One anonymous mapping, block-major: pages are only committed when a block is first written, and
anybody (torch, numpy, a socket) can look at it through the buffer protocol without a copy.
"""

import mmap

from kvtransfer.layout import KvLayout


class HostMemory:
    """num_blocks blocks of layout.block_bytes, contiguous. Owner of the mapping."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is below 1")
        self.layout = layout
        self.num_blocks = num_blocks
        self._map = mmap.mmap(-1, num_blocks * layout.block_bytes)
        self.buffer = memoryview(self._map)

    def block(self, index: int) -> memoryview:
        """The bytes of one block, writable, shared."""
        size = self.layout.block_bytes
        return self.buffer[index * size : (index + 1) * size]
