"""What the coordinator knows of a node's cache: events, gaps, bounds, and the longest prefix."""

import pytest

from coordinator.prefix_index import PrefixIndex

CHAIN = (11, 12, 13, 14, 15)


def index(*hashes: int, max_hashes: int = 10) -> PrefixIndex:
    result = PrefixIndex(max_hashes=max_hashes)
    assert result.take_in(seq=0, added=hashes, is_snapshot=True)
    return result


@pytest.mark.parametrize("num_there", range(len(CHAIN) + 1))
def test_the_longest_prefix_is_found_whatever_its_length(num_there):
    known = index(*CHAIN[:num_there], 98, 99)
    assert known.longest(CHAIN) == num_there
    assert known.longest(CHAIN[:2]) == min(2, num_there)
    assert known.longest(()) == 0


def test_added_and_evicted_hashes_change_what_is_found():
    known = index(11)
    assert known.take_in(seq=1, added=(12, 13))
    assert known.longest(CHAIN) == 3
    assert known.take_in(seq=3, added=(14,), evicted=(13,))
    # 14 is there, and what it goes on from is not.
    assert known.longest(CHAIN) == 2
    assert len(known) == 3


def test_after_a_gap_nothing_is_known_until_a_snapshot():
    known = index(11, 12)
    assert not known.take_in(seq=3, added=(14,))
    assert (len(known), known.longest(CHAIN)) == (0, 0)
    # Told once; what was on its way is passed over.
    assert known.take_in(seq=4, added=(15,))
    assert len(known) == 0
    assert known.take_in(seq=70, added=(11, 12, 13), is_snapshot=True)
    assert known.longest(CHAIN) == 3
    assert known.take_in(seq=73, added=(14,))
    assert known.longest(CHAIN) == 4


def test_events_that_come_twice_are_a_gap():
    known = index(11)
    assert known.take_in(seq=1, added=(12,))
    assert not known.take_in(seq=1, added=(12,))


def test_a_snapshot_forgets_what_was_there():
    known = index(98, 99)
    assert known.take_in(seq=2, added=(11,), is_snapshot=True)
    assert len(known) == 1


def test_events_before_the_first_snapshot_are_passed_over():
    known = PrefixIndex(max_hashes=10)
    assert known.take_in(seq=5, added=(11,))
    assert known.longest(CHAIN) == 0


def test_more_than_the_node_has_blocks_is_not_kept():
    known = index(1, 2, max_hashes=3)
    assert known.take_in(seq=2, added=(3,))
    assert known.take_in(seq=3, added=(4,), evicted=(1,))
    assert not known.take_in(seq=5, added=(5,))
    assert len(known) == 0
