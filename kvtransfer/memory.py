"""The bytes behind the block pool: what a lane asks of them, and how they are kept on the host.

    KvMemory    HostMemory, here, and DeviceMemory (kvtransfer/device_memory.py)

On the host: one anonymous mapping, block-major: pages are only committed when a block is first
written, and anybody (torch, numpy, a socket) can look at it through the buffer protocol without a
copy.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from kvtransfer.layout import KvLayout


class KvMemory(Protocol):
    """Blocks that can be read and written as bytes, wherever they are. Called by the lanes, while
    they have the blocks claimed."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    def reading(self, block_ids: Sequence[int]) -> AbstractContextManager[list[memoryview]]:
        """The bytes of each block, within the with block. May wait for a device copy."""
        ...

    def write(self, block_ids: Sequence[int], data: memoryview) -> None:
        """data over the blocks, in order; returns when it is there. Raises ValueError for data of
        another size."""
        ...


class HostMemory:
    """num_blocks blocks of layout.block_bytes, contiguous. Owner of the mapping."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is below 1")
        self.layout = layout
        self.num_blocks = num_blocks
        # Private, because shared mappings (Python's default) get no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, num_blocks * layout.block_bytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Attention reads a piece of every block: 5 to 8 % of a step went into page walks.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(self._map)

    def block(self, index: int) -> memoryview:
        """The bytes of one block, writable, shared."""
        size = self.layout.block_bytes
        return self.buffer[index * size : (index + 1) * size]

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[list[memoryview]]:
        """The blocks themselves: no copy."""
        yield [self.block(index) for index in block_ids]

    def write(self, block_ids: Sequence[int], data: memoryview) -> None:
        size = self.layout.block_bytes
        if data.nbytes != len(block_ids) * size:
            raise ValueError(
                f"data: {data.nbytes} bytes for {len(block_ids) * size} bytes of blocks"
            )
        for offset, index in enumerate(block_ids):
            self.block(index)[:] = data[offset * size : (offset + 1) * size]


def host_slots(num_slots: int, *, slot_bytes: int) -> list[memoryview]:
    """Staging on the host. Mapped: a lane that is never used takes no memory."""
    return [memoryview(mmap.mmap(-1, slot_bytes)) for _ in range(num_slots)]
