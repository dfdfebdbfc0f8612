"""The ownership table: by single cases, and by a state machine against a plain model of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kvtransfer.blocks import BlockPool, BlocksExhausted, Lease, LeaseReleased


def test_reserve_takes_all_or_none():
    pool = BlockPool(3)
    pool.reserve(2)
    with pytest.raises(BlocksExhausted) as error:
        pool.reserve(2)
    assert (error.value.needed, error.value.available) == (2, 1)
    assert pool.counts().free == 1


def test_release_waits_for_open_write():
    freed = []
    pool = BlockPool(2, on_free=lambda: freed.append(pool.counts().free))
    lease = pool.reserve(2)
    first, _ = lease.block_ids
    pool.begin_write(lease, [first], writer="lane")
    pool.release(lease)
    assert pool.counts().free == 1
    pool.end_write([first], writer="lane")
    assert freed == [1, 2]


def test_release_waits_for_the_last_reader():
    pool = BlockPool(1)
    lease = pool.reserve(1)
    pool.begin_write(lease, lease.block_ids, writer="engine")
    pool.end_write(lease.block_ids, writer="engine")
    pool.begin_read(lease, lease.block_ids)
    pool.begin_read(lease, lease.block_ids)
    pool.release(lease)
    pool.end_read(lease.block_ids)
    assert pool.counts().free == 0
    pool.end_read(lease.block_ids)
    assert pool.counts().free == 1


def test_late_write_through_a_released_lease_is_refused_though_the_block_is_leased_again():
    pool = BlockPool(1)
    old = pool.reserve(1)
    pool.release(old)
    new = pool.reserve(1)
    assert new.block_ids == old.block_ids
    with pytest.raises(LeaseReleased):
        pool.begin_write(old, old.block_ids, writer="late")
    pool.release(old)
    assert pool.counts().reserved == 1


def test_release_twice_frees_once():
    pool = BlockPool(2)
    lease = pool.reserve(2)
    pool.release(lease)
    pool.release(lease)
    assert pool.counts().free == 2


def test_a_second_writer_is_a_fault():
    pool = BlockPool(1)
    lease = pool.reserve(1)
    pool.begin_write(lease, lease.block_ids, writer="engine")
    with pytest.raises(AssertionError):
        pool.begin_write(lease, lease.block_ids, writer="lane")


class PoolMachine(RuleBasedStateMachine):
    """Random use; the model is three dicts: leases, writers, readers by block."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.held: dict[int, Lease] = {}
        self.writing: dict[int, int] = {}
        self.reading: list[int] = []
        self.sealed: set[int] = set()

    def busy(self) -> set[int]:
        held = {index for lease in self.held.values() for index in lease.block_ids}
        return held | set(self.writing) | set(self.reading)

    @rule(target=leases, num_blocks=st.integers(0, 4))
    def reserve(self, num_blocks: int):
        available = 7 - len(self.busy())
        if num_blocks > available:
            with pytest.raises(BlocksExhausted):
                self.pool.reserve(num_blocks)
            return multiple()
        lease = self.pool.reserve(num_blocks)
        assert not set(lease.block_ids) & self.busy()
        self.held[lease.id] = lease
        self.sealed -= set(lease.block_ids)
        return lease

    @rule(lease=leases, data=st.data())
    def begin_write(self, lease: Lease, data: st.DataObject):
        if not lease.block_ids:
            return
        index = data.draw(st.sampled_from(lease.block_ids))
        if lease.id not in self.held:
            with pytest.raises(LeaseReleased):
                self.pool.begin_write(lease, [index], writer=str(lease.id))
        elif index not in self.writing and index not in self.reading:
            self.pool.begin_write(lease, [index], writer=str(lease.id))
            self.writing[index] = lease.id
            self.sealed.discard(index)

    @rule(data=st.data())
    def end_write(self, data: st.DataObject):
        if self.writing:
            index = data.draw(st.sampled_from(sorted(self.writing)))
            self.pool.end_write([index], writer=str(self.writing.pop(index)))
            self.sealed.add(index)

    @rule(lease=leases, data=st.data())
    def begin_read(self, lease: Lease, data: st.DataObject):
        sealed = [i for i in lease.block_ids if i in self.sealed]
        if lease.id in self.held and sealed:
            index = data.draw(st.sampled_from(sealed))
            self.pool.begin_read(lease, [index])
            self.reading.append(index)

    @rule(data=st.data())
    def end_read(self, data: st.DataObject):
        if self.reading:
            index = data.draw(st.sampled_from(self.reading))
            self.reading.remove(index)
            self.pool.end_read([index])

    @rule(lease=leases)
    def release(self, lease: Lease):
        self.pool.release(lease)
        self.held.pop(lease.id, None)

    @invariant()
    def the_states_add_up(self):
        counts = self.pool.counts()
        parts = counts.free + counts.reserved + counts.writing + counts.sealed
        assert parts == counts.total
        assert counts.free == 7 - len(self.busy())
        assert counts.writing == len(self.writing)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
