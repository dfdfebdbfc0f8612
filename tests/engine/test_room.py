"""Who gets blocks of a node now, without anybody waiting."""

import pytest

from engine.room import NodeFull, Room
from kvtransfer.blocks import BlockPool, BlocksExhausted


def test_headroom_is_a_block_for_each_request_that_runs_already():
    pool = BlockPool(10)
    room = Room(pool, max_running=8)
    room.take(3, headroom=True)
    room.take(3, headroom=True)
    # Four are left: two of them for the two that run.
    with pytest.raises(BlocksExhausted):
        room.take(3, headroom=True)
    lease = room.take(2, headroom=True)
    assert (room.num_running, pool.counts().available) == (3, 2)
    room.give_back(lease)
    assert (room.num_running, pool.counts().available) == (2, 4)


def test_a_request_that_needs_the_whole_pool_gets_it_when_nobody_is_there():
    room = Room(BlockPool(10), max_running=8)
    room.take(10, headroom=True)
    with pytest.raises(BlocksExhausted):
        room.take(1)


def test_a_node_that_is_full_refuses_and_takes_nothing():
    pool = BlockPool(10)
    room = Room(pool, max_running=1)
    room.take(1)
    with pytest.raises(NodeFull):
        room.take(1)
    assert pool.counts().available == 9
