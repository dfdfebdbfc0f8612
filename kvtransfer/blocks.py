"""Who owns which KV block: the ownership table.

    FREE -> RESERVED -> WRITING(engine | lane) -> SEALED(readers: attention, send) -> FREE

A lease is the right to a set of blocks. Only its holder may write them, one writer at a time, and
a late write through a released lease is refused, so that it cannot reach another request's KV. A
release is immediate for idle blocks and waits, block by block, for open writers and readers.

Pure Python behind one lock: callable from any thread, no I/O inside. The bytes are in memory.py.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class BlockState(Enum):
    FREE = "free"
    RESERVED = "reserved"
    WRITING = "writing"
    SEALED = "sealed"


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
    """A right to block_ids, in the order of the tokens that they hold. id is never used again."""

    id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks by state; they always add up to total."""

    free: int
    reserved: int
    writing: int
    sealed: int
    total: int

    @property
    def available(self) -> int:
        return self.free


@dataclass(slots=True)
class _Block:
    state: BlockState = BlockState.FREE
    lease_id: int | None = None
    writer: str | None = None
    num_readers: int = 0
    # The lease is gone; freed when the last writer or reader leaves.
    orphaned: bool = False


class BlockPool:
    """The one owner of num_blocks block states. on_free is called, outside the lock, after blocks
    came free."""

    def __init__(self, num_blocks: int, *, on_free: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._count = dict.fromkeys(BlockState, 0)
        self._count[BlockState.FREE] = num_blocks
        self._next_lease_id = 1
        self._on_free = on_free

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def counts(self) -> BlockCounts:
        with self._lock:
            return BlockCounts(
                free=self._count[BlockState.FREE],
                reserved=self._count[BlockState.RESERVED],
                writing=self._count[BlockState.WRITING],
                sealed=self._count[BlockState.SEALED],
                total=len(self._blocks),
            )

    def reserve(self, num_blocks: int) -> Lease:
        """Takes num_blocks free blocks, all or none. Raises BlocksExhausted."""
        with self._lock:
            if num_blocks > len(self._free):
                raise BlocksExhausted(needed=num_blocks, available=len(self._free))
            block_ids = tuple(self._free.pop() for _ in range(num_blocks))
            lease = Lease(id=self._next_lease_id, block_ids=block_ids)
            self._next_lease_id += 1
            for index in block_ids:
                self._set(self._blocks[index], BlockState.RESERVED)
                self._blocks[index].lease_id = lease.id
            return lease

    def begin_write(self, lease: Lease, block_ids: Iterable[int], *, writer: str) -> None:
        """Makes writer the only writer of these blocks of the lease, all or none.

        Raises LeaseReleased. A block with a writer or readers is a fault of ours.
        """
        with self._lock:
            blocks = self._of_lease(lease, block_ids)
            for block in blocks:
                assert block.writer is None, f"{writer}: block has writer {block.writer}"
                assert block.num_readers == 0, f"{writer}: block has readers"
            for block in blocks:
                block.writer = writer
                self._set(block, BlockState.WRITING)

    def end_write(self, block_ids: Iterable[int], *, writer: str, then_read: bool = False) -> None:
        """Seals blocks that writer was writing; then_read makes it a reader of them at once."""
        freed = False
        with self._lock:
            for index in block_ids:
                block = self._blocks[index]
                assert block.writer == writer, f"{writer}: block has writer {block.writer}"
                block.writer = None
                block.num_readers += then_read
                self._set(block, BlockState.SEALED)
                freed |= self._free_if_idle(index)
        if freed:
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
        freed = False
        with self._lock:
            for index in block_ids:
                block = self._blocks[index]
                assert block.num_readers > 0, "end_read without begin_read"
                block.num_readers -= 1
                freed |= self._free_if_idle(index)
        if freed:
            self._on_free()

    def release(self, lease: Lease) -> None:
        """Gives the blocks back, each as soon as nobody writes or reads it. Idempotent."""
        freed = False
        with self._lock:
            for index in lease.block_ids:
                block = self._blocks[index]
                if block.lease_id == lease.id and not block.orphaned:
                    block.orphaned = True
                    freed |= self._free_if_idle(index)
        if freed:
            self._on_free()

    def _of_lease(self, lease: Lease, block_ids: Iterable[int]) -> list[_Block]:
        blocks = [self._blocks[index] for index in block_ids]
        for block in blocks:
            if block.lease_id != lease.id or block.orphaned:
                raise LeaseReleased(f"lease {lease.id} was released")
        return blocks

    def _set(self, block: _Block, state: BlockState) -> None:
        self._count[block.state] -= 1
        self._count[state] += 1
        block.state = state

    def _free_if_idle(self, index: int) -> bool:
        block = self._blocks[index]
        if not block.orphaned or block.writer is not None or block.num_readers:
            return False
        self._set(block, BlockState.FREE)
        block.lease_id = None
        block.orphaned = False
        self._free.append(index)
        return True
