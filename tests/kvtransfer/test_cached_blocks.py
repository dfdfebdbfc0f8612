"""Blocks that outlive their lease: by single cases, and by a state machine that knows what was
written where."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kvtransfer.blocks import BlockPool, BlocksExhausted, Lease
from kvtransfer.cache_log import CacheLog
from kvtransfer.prefix import short_hash

A, B, C, D = (bytes([number]) * 32 for number in range(1, 5))


def computed(pool: BlockPool, hashes: list[bytes], *, num_blocks: int | None = None) -> Lease:
    """A lease whose first blocks are sealed under hashes, those that are not there yet."""
    lease = pool.reserve(num_blocks or len(hashes), prefix=hashes)
    new = lease.block_ids[lease.num_cached : len(hashes)]
    pool.begin_write(lease, new, writer="engine")
    pool.end_write(new, writer="engine")
    pool.publish(lease.block_ids[: len(hashes)], hashes)
    return lease


def cached(pool: BlockPool, *hashes: bytes) -> list[bool]:
    there = set(pool.cache_snapshot().added)
    return [short_hash(each) in there for each in hashes]


def test_a_published_block_is_kept_and_found_by_who_begins_the_same():
    pool = BlockPool(4)
    first = computed(pool, [A, B], num_blocks=3)
    pool.release(first)
    counts = pool.counts()
    assert (counts.cached, counts.free, counts.available) == (2, 2, 4)
    second = pool.reserve(3, prefix=[A, B])
    assert second.num_cached == 2
    assert second.block_ids[:2] == first.block_ids[:2]
    assert pool.counts().cached == 0


def test_two_leases_share_a_block_that_neither_may_write():
    pool = BlockPool(4)
    first = computed(pool, [A])
    second = pool.reserve(2, prefix=[A, B])
    assert second.block_ids[0] == first.block_ids[0]
    for lease in (first, second):
        with pytest.raises(AssertionError, match="published"):
            pool.begin_write(lease, lease.block_ids[:1], writer="lane")
    pool.begin_read(second, second.block_ids[:1])
    pool.release(first)
    pool.release(second)
    assert pool.counts().sealed == 1
    pool.end_read(second.block_ids[:1])
    assert pool.counts().cached == 1


def test_a_hit_is_the_beginning_that_is_there():
    pool = BlockPool(6)
    pool.release(computed(pool, [A, B]))
    assert pool.reserve(3, prefix=[A, C, B]).num_cached == 1
    assert pool.reserve(1, prefix=[D]).num_cached == 0
    counts = pool.cache_counts()
    assert (counts.num_lookups, counts.num_looked_up_blocks, counts.num_hit_blocks) == (3, 6, 1)


def test_the_least_recently_used_end_goes_first():
    pool = BlockPool(3)
    pool.release(computed(pool, [A, B]))
    pool.release(computed(pool, [C]))
    pool.release(pool.reserve(2, prefix=[A, B]))
    # C is the oldest now; of A and B, which were used together, B is the end.
    pool.release(pool.reserve(1))
    assert cached(pool, A, B, C) == [True, True, False]
    pool.release(pool.reserve(2))
    assert cached(pool, A, B, C) == [True, False, False]


def test_a_hit_is_not_evicted_for_the_rest_of_its_own_lease():
    pool = BlockPool(3)
    pool.release(computed(pool, [A, B, C]))
    lease = pool.reserve(3, prefix=[A])
    assert lease.num_cached == 1
    assert cached(pool, A, B, C) == [True, False, False]
    with pytest.raises(BlocksExhausted):
        pool.reserve(1)


def test_idle_blocks_of_the_hit_itself_do_not_count_as_available():
    pool = BlockPool(3)
    pool.release(computed(pool, [A, B]))
    with pytest.raises(BlocksExhausted) as error:
        pool.reserve(4, prefix=[A, B])
    assert (error.value.needed, error.value.available) == (2, 1)
    with pytest.raises(BlocksExhausted):
        pool.reserve(3, prefix=[A, B], spare=1)
    assert pool.reserve(3, prefix=[A, B]).num_cached == 2


def test_a_block_computed_twice_is_published_once():
    pool = BlockPool(4)
    first = pool.reserve(1)
    second = pool.reserve(1)
    for lease in (first, second):
        pool.begin_write(lease, lease.block_ids, writer="engine")
        pool.end_write(lease.block_ids, writer="engine")
        pool.publish(lease.block_ids, [A])
    pool.release(second)
    assert pool.counts().free == 3
    pool.release(first)
    assert (pool.counts().free, pool.counts().cached) == (3, 1)


def test_nothing_is_published_behind_what_is_gone():
    pool = BlockPool(2)
    lease = pool.reserve(1)
    pool.begin_write(lease, lease.block_ids, writer="engine")
    pool.end_write(lease.block_ids, writer="engine")
    pool.publish(lease.block_ids, [B], parent=A)
    assert cached(pool, B) == [False]


def test_an_idle_beginning_is_available_though_its_end_is_held():
    pool = BlockPool(3)
    twice = pool.reserve(2)
    pool.begin_write(twice, twice.block_ids, writer="engine")
    pool.end_write(twice.block_ids, writer="engine")
    once = computed(pool, [A])
    # A is published by one and was computed by both, B goes on from the other's A.
    pool.publish(twice.block_ids, [A, B])
    pool.release(once)
    assert pool.counts().available == 1
    pool.reserve(1)
    assert cached(pool, A, B) == [False, False]
    pool.release(twice)
    assert pool.counts().free == 2


def test_clear_frees_what_is_idle_and_forgets_what_is_held():
    pool = BlockPool(4)
    held = computed(pool, [A, B])
    pool.release(computed(pool, [C]))
    pool.clear_cache()
    assert (pool.counts().free, pool.counts().cached, pool.counts().sealed) == (2, 0, 2)
    assert pool.cache_snapshot().added == ()
    pool.publish(held.block_ids[1:], [B], parent=A)
    pool.release(held)
    assert pool.counts().free == 4


def test_changes_are_net_and_begin_where_the_last_ended():
    pool = BlockPool(2)
    pool.release(computed(pool, [A, B]))
    changes = pool.cache_changes(since=0)
    assert changes is not None
    assert (changes.next_seq, set(changes.added)) == (2, {short_hash(A), short_hash(B)})
    pool.release(computed(pool, [C]))
    pool.release(computed(pool, [B]))
    # B was evicted for C and has come back, for A.
    changes = pool.cache_changes(since=changes.next_seq)
    assert changes is not None
    assert set(changes.added) == {short_hash(B), short_hash(C)}
    assert set(changes.evicted) == {short_hash(A)}
    assert pool.cache_changes(since=changes.next_seq + 1) is None


def test_a_log_that_does_not_reach_back_asks_for_a_snapshot():
    log = CacheLog(max_logged=2)
    for block_hash in (A, B, C):
        log.add(block_hash)
    assert log.since(0) is None
    changes = log.since(1)
    assert changes is not None
    assert set(changes.added) == {short_hash(B), short_hash(C)}
    snapshot = log.snapshot([A, B, C])
    assert (snapshot.next_seq, len(snapshot.added)) == (3, 3)


NUM_BLOCKS = 8
# Of one token each, of two kinds, so that many begin alike.
texts = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
Text = tuple[int, ...]


def hash_of(text: Text) -> bytes:
    return bytes(text).ljust(32, b"\xff")


def chain_of(text: Text) -> list[bytes]:
    return [hash_of(text[: end + 1]) for end in range(len(text))]


class CacheMachine(RuleBasedStateMachine):
    """content is what was last written to each block: the text up to its token."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.content: dict[int, Text] = {}
        self.text: dict[int, Text] = {}
        self.num_written: dict[int, int] = {}
        self.live: dict[int, Lease] = {}
        self.reading: list[tuple[int, Text]] = []
        self.index: set[int] = set()
        self.seq = 0

    @rule(target=leases, text=texts)
    def reserve(self, text: Text):
        available = self.pool.counts().available
        try:
            lease = self.pool.reserve(len(text) + 1, prefix=chain_of(text)[:-1])
        except BlocksExhausted as error:
            assert error.available < error.needed
            assert available <= len(text)
            return multiple()
        assert len(set(lease.block_ids)) == len(text) + 1
        for position, index in enumerate(lease.block_ids[: lease.num_cached]):
            assert self.content[index] == text[: position + 1], "another prefix"
        read = {index for index, _ in self.reading}
        assert not set(lease.block_ids[lease.num_cached :]) & read
        self.live[lease.id] = lease
        self.text[lease.id] = text
        self.num_written[lease.id] = lease.num_cached
        return lease

    @rule(lease=leases, is_published=st.booleans())
    def compute(self, lease: Lease, is_published: bool):
        """The next block. What is not published now is published with a later one, or never."""
        if lease.id not in self.text or self.num_written[lease.id] == len(self.text[lease.id]):
            return
        position = self.num_written[lease.id]
        index, text = lease.block_ids[position], self.text[lease.id][: position + 1]
        self.pool.begin_write(lease, [index], writer=str(lease.id))
        self.content[index] = text
        self.pool.end_write([index], writer=str(lease.id))
        self.num_written[lease.id] += 1
        if is_published:
            parent = hash_of(text[:-1]) if position else None
            self.pool.publish([index], [hash_of(text)], parent=parent)

    @rule(lease=leases)
    def publish_all(self, lease: Lease):
        if lease.id in self.text:
            num_written = self.num_written[lease.id]
            hashes = chain_of(self.text[lease.id][:num_written])
            self.pool.publish(lease.block_ids[:num_written], hashes)

    @rule(lease=leases, data=st.data())
    def begin_read(self, lease: Lease, data: st.DataObject):
        written = lease.block_ids[: self.num_written.get(lease.id, 0)]
        if lease.id in self.text and written:
            index = data.draw(st.sampled_from(written))
            self.pool.begin_read(lease, [index])
            self.reading.append((index, self.content[index]))

    @rule(data=st.data())
    def end_read(self, data: st.DataObject):
        if self.reading:
            reading = data.draw(st.sampled_from(self.reading))
            self.reading.remove(reading)
            self.pool.end_read(reading[:1])

    @rule(lease=leases)
    def release(self, lease: Lease):
        self.pool.release(lease)
        self.text.pop(lease.id, None)

    @rule()
    def all_that_is_available_can_be_had(self):
        available = self.pool.counts().available
        with pytest.raises(BlocksExhausted):
            self.pool.reserve(available + 1)
        self.pool.release(self.pool.reserve(available))

    @rule()
    def grow(self):
        """A running sequence takes a block, and gives it back."""
        if self.pool.counts().available:
            self.pool.release(self.pool.reserve(1))

    @rule()
    def clear(self):
        self.pool.clear_cache()
        assert self.pool.counts().cached == 0

    @rule()
    def coordinator_hears(self):
        changes = self.pool.cache_changes(since=self.seq)
        assert changes is not None
        assert not set(changes.added) & set(changes.evicted)
        self.index = (self.index - set(changes.evicted)) | set(changes.added)
        self.seq = changes.next_seq
        assert self.index == set(self.pool.cache_snapshot().added)

    @invariant()
    def the_states_add_up(self):
        counts = self.pool.counts()
        parts = counts.free + counts.reserved + counts.writing + counts.sealed + counts.cached
        assert parts == counts.total

    @invariant()
    def what_is_cached_of_a_chain_is_its_beginning(self):
        there = set(self.pool.cache_snapshot().added)
        for text in set(self.content.values()):
            if short_hash(hash_of(text)) in there:
                assert all(short_hash(each) in there for each in chain_of(text))

    @invariant()
    def what_somebody_has_or_reads_is_what_was_there(self):
        for lease_id, text in self.text.items():
            num_written = self.num_written[lease_id]
            for position, index in enumerate(self.live[lease_id].block_ids[:num_written]):
                assert self.content[index] == text[: position + 1]
        for index, text in self.reading:
            assert self.content[index] == text


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
