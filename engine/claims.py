"""The engine's claims on the blocks of its sequences, so that a lease may be released at any time.

    add:   full computed blocks are read, the others written      grow: one more block, written
    seal:  a block that is full goes from written to read,         drop: all are let go
           and is published, where the sequence has a hash chain

A sequence grows by leases of the engine's own, block by block, behind the lease that its request
brought. Runs on the engine thread.
"""

from dataclasses import dataclass, field

from engine.scheduler import Running
from kvtransfer.blocks import BlockPool, Lease, LeaseReleased
from kvtransfer.memory import KvMemory
from kvtransfer.prefix import PrefixChain


@dataclass(slots=True)
class _Held:
    """Blocks of table before num_sealed are read, others are written."""

    request_id: str
    lease: Lease
    writer: str
    table: list[int]
    token_ids: list[int]
    chain: PrefixChain | None
    num_sealed: int = 0
    grown: list[Lease] = field(default_factory=list)


class Claims:
    """By the key of a sequence. Owner of the leases that sequences grew by."""

    def __init__(self, pool: BlockPool, memory: KvMemory) -> None:
        self._pool = pool
        self._memory = memory
        self._block_size = memory.layout.block_size
        self._held: dict[int, _Held] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def held_keys(self) -> list[int]:
        return list(self._held)

    def request_id(self, key: int) -> str:
        return self._held[key].request_id

    def of_same_lease(self, key: int) -> list[int]:
        """This sequence and the other choices of its request."""
        lease_id = self._held[key].lease.id
        return [other for other, held in self._held.items() if held.lease.id == lease_id]

    def add(
        self,
        sequence: Running,
        lease: Lease,
        *,
        copy_from: int | None,
        chain: PrefixChain | None = None,
    ) -> bool:
        """Claims the sequence's blocks, the first one that is not full as a copy of copy_from.
        False if the lease was released."""
        table = sequence.block_table
        held = _Held(
            request_id=sequence.spec.request_id,
            lease=lease,
            writer=f"engine {sequence.key}",
            table=table,
            token_ids=sequence.token_ids,
            chain=chain,
        )
        held.num_sealed = sequence.num_computed // self._block_size
        computed, rest = table[: held.num_sealed], table[held.num_sealed :]
        try:
            self._pool.begin_write(lease, rest, writer=held.writer)
        except LeaseReleased:
            return False
        try:
            self._pool.begin_read(lease, computed)
        except LeaseReleased:
            self._pool.end_write(rest, writer=held.writer)
            return False
        if copy_from is not None:
            with self._memory.reading([copy_from]) as (block,):
                self._memory.write(rest[:1], block)
        self._held[sequence.key] = held
        return True

    def grow(self, key: int) -> None:
        """One more block at the end of the sequence's table. Raises BlocksExhausted."""
        held = self._held[key]
        lease = self._pool.reserve(1)
        self._pool.begin_write(lease, lease.block_ids, writer=held.writer)
        held.grown.append(lease)
        held.table.extend(lease.block_ids)

    def seal(self, key: int, *, num_computed: int) -> None:
        """The blocks that are full now."""
        held = self._held[key]
        start, end = held.num_sealed, num_computed // self._block_size
        if start < end:
            held.num_sealed = end
            block_ids = held.table[start:end]
            self._pool.end_write(block_ids, writer=held.writer, then_read=True)
            if held.chain is not None:
                held.chain.extend(held.token_ids, num_blocks=end)
                hashes = held.chain.hashes
                parent = hashes[start - 1] if start else None
                self._pool.publish(block_ids, hashes[start:end], parent=parent)

    def drop(self, key: int) -> None:
        """Nothing if there are none."""
        held = self._held.pop(key, None)
        if held is not None:
            for lease in held.grown:
                self._pool.release(lease)
            self._pool.end_write(held.table[held.num_sealed :], writer=held.writer)
            # All at once, so that the end of a prefix goes idle before its beginning.
            self._pool.end_read(held.table[: held.num_sealed])

    def evict(self, key: int) -> None:
        """Drops the claims and releases the request's own lease, whose owner may be slow to."""
        lease = self._held[key].lease
        self.drop(key)
        self._pool.release(lease)
