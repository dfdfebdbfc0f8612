"""What a coordinator is told of a node's cache: numbered, bounded, whole when it must be."""

from coordinator.prefix_index import PrefixIndex
from engine.cache_feed import MAX_HASHES, CacheFeed
from kvtransfer.blocks import BlockPool
from kvtransfer.cache_log import MAX_LOGGED
from kvtransfer.prefix import short_hash


def hashes(start: int, end: int) -> list[bytes]:
    """Made up; their short hashes are start, start + 1, ..."""
    return [number.to_bytes(8, "big") for number in range(start, end)]


def cache(pool: BlockPool, chain: list[bytes]) -> None:
    """A request of this chain came and went."""
    lease = pool.reserve(len(chain), prefix=chain)
    fresh = lease.block_ids[lease.num_cached :]
    pool.begin_write(lease, fresh, writer="test")
    pool.end_write(fresh, writer="test")
    pool.publish(lease.block_ids, chain)
    pool.release(lease)


def test_the_first_message_is_all_there_is_also_when_that_is_nothing():
    feed = CacheFeed(BlockPool(4))
    (first,) = feed.messages()
    assert (first.seq, first.is_snapshot, list(first.added)) == (0, True, [])
    assert list(feed.messages()) == []


def test_later_messages_are_what_has_changed():
    pool = BlockPool(4)
    cache(pool, hashes(1, 4))
    feed = CacheFeed(pool)
    (first,) = feed.messages()
    assert (first.seq, first.is_snapshot, sorted(first.added)) == (0, True, [1, 2, 3])
    # Three blocks and one that is free: two must go, leaves first.
    cache(pool, hashes(7, 10))
    (second,) = feed.messages()
    assert (second.seq, second.is_snapshot) == (3, False)
    assert (sorted(second.added), sorted(second.evicted)) == ([7, 8, 9], [2, 3])
    pool.clear_cache()
    (third,) = feed.messages()
    assert (third.seq, sorted(third.evicted), list(third.added)) == (8, [1, 7, 8, 9], [])


def test_a_restart_and_a_log_that_is_too_short_tell_everything_again():
    pool = BlockPool(2)
    feed = CacheFeed(pool)
    list(feed.messages())
    cache(pool, hashes(1, 2))
    assert [event.seq for event in feed.messages()] == [0]
    feed.restart()
    (again,) = feed.messages()
    assert (again.seq, again.is_snapshot, list(again.added)) == (1, True, [1])
    for number in range(MAX_LOGGED // 2 + 2):
        cache(pool, hashes(10 + 2 * number, 12 + 2 * number))
    (whole,) = feed.messages()
    assert whole.is_snapshot
    assert len(whole.added) == 2


def test_many_changes_are_several_messages_that_an_index_of_its_size_takes_in():
    num_blocks = MAX_HASHES + 1
    pool, index = BlockPool(num_blocks), PrefixIndex(max_hashes=num_blocks)
    feed = CacheFeed(pool)
    old, new = hashes(0, num_blocks), hashes(10_000, 10_000 + num_blocks)
    for chain in (old, new):
        cache(pool, chain)
        for events in feed.messages():
            assert len(events.added) + len(events.evicted) <= MAX_HASHES
            assert index.take_in(
                seq=events.seq,
                added=events.added,
                evicted=events.evicted,
                is_snapshot=events.is_snapshot,
            )
        assert index.longest(list(map(short_hash, chain))) == num_blocks
    assert len(index) == num_blocks
