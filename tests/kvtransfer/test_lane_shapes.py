"""Nodes that lay out their blocks differently, and what is behind the last token, over sockets."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from test_lane import FIRST, LAYOUT, Pair

SHAPES = {
    "larger blocks": replace(LAYOUT, block_size=64),
    "smaller blocks": replace(LAYOUT, block_size=4),
    "odd blocks": replace(LAYOUT, block_size=7),
    "another order": replace(LAYOUT, inner_order="L2SHD"),
    "both": replace(LAYOUT, block_size=5, inner_order="L2SHD"),
}


def tokens(pair_memory, block_ids, num_tokens: int) -> np.ndarray:
    """[num_tokens, L, 2, H, D]: the KV of each token, read block by block."""
    layout = pair_memory.layout
    axes = {"L": layout.num_layers, "2": 2, "H": layout.num_kv_heads, "S": layout.block_size}
    shape = [axes.get(letter, layout.head_dim) for letter in layout.inner_order]
    order = [layout.inner_order.index(letter) for letter in "SL2HD"]
    blocks = [
        np.frombuffer(pair_memory.block(index), dtype=np.uint32).reshape(shape).transpose(order)
        for index in block_ids
    ]
    return np.concatenate(blocks)[:num_tokens]


@pytest.mark.parametrize("plane", ["grpc", "gloo"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 123])
async def test_every_token_arrives_whatever_the_shape_of_the_senders_blocks(
    shape, num_tokens, plane
):
    theirs = SHAPES[shape]
    async with Pair(layout=theirs, plane=plane) as pair, asyncio.timeout(20):
        incoming, received = pair.expect(LAYOUT.blocks_for(num_tokens), num_tokens=num_tokens)
        num_blocks = theirs.blocks_for(num_tokens)
        lane, lease, outgoing, sent = await pair.send(
            incoming.transfer_id, num_blocks, num_tokens=num_tokens
        )
        pair.compute(lease, 0, num_blocks)
        for index in range(num_blocks):
            lane.offer(outgoing, first_block=index, num_blocks=1)
        lane.commit(outgoing, num_blocks=num_blocks, first_tokens=FIRST)
        assert await sent is None
        assert await received is None
        ours = tokens(pair.receive_memory, incoming.lease.block_ids, num_tokens)
        expected = tokens(pair.send_memory, lease.block_ids, num_tokens)
        assert np.array_equal(ours, expected)


@pytest.mark.parametrize("shape", [*SHAPES, "the same"])
async def test_only_what_is_missing_behind_a_cached_prefix_is_shipped(shape):
    theirs = SHAPES.get(shape, LAYOUT)
    hashes = [bytes([number]) * 32 for number in range(3)]
    async with Pair(layout=theirs) as pair, asyncio.timeout(20):
        earlier = pair.receive_pool.reserve(3)
        pair.receive_pool.begin_write(earlier, earlier.block_ids, writer="lane")
        for index in earlier.block_ids:
            pair.receive_memory.block(index)[:] = bytes([7]) * LAYOUT.block_bytes
        pair.receive_pool.end_write(earlier.block_ids, writer="lane")
        pair.receive_pool.publish(earlier.block_ids, hashes)
        incoming, received = pair.expect(LAYOUT.blocks_for(123), num_tokens=123, prefix=hashes)
        assert incoming.num_cached_tokens == 48
        num_blocks = theirs.blocks_for(123)
        lane, lease, outgoing, sent = await pair.send(
            incoming.transfer_id, num_blocks, num_tokens=123
        )
        pair.compute(lease, 0, num_blocks)
        first = 48 // theirs.block_size
        lane.offer(outgoing, first_block=first, num_blocks=num_blocks - first)
        lane.commit(outgoing, num_blocks=num_blocks - first, first_tokens=FIRST)
        assert await sent is None
        assert await received is None
        ours = tokens(pair.receive_memory, incoming.lease.block_ids, 123)
        expected = tokens(pair.send_memory, lease.block_ids, 123)
        assert np.array_equal(ours[48:], expected[48:])
        assert (ours[:48] == 0x07070707).all()


@pytest.mark.parametrize("plane", ["grpc", "gloo"])
@pytest.mark.parametrize("num_tokens", [1, 15, 17])
async def test_what_is_behind_the_last_token_never_leaves_the_sender(num_tokens, plane):
    async with Pair(plane=plane) as pair, asyncio.timeout(20):
        num_blocks = LAYOUT.blocks_for(num_tokens)
        incoming, received = pair.expect(num_blocks, num_tokens=num_tokens)
        lane, lease, outgoing, _ = await pair.send(
            incoming.transfer_id, num_blocks, num_tokens=num_tokens
        )
        # Random bytes everywhere, as another request would have left them.
        pair.compute(lease, 0, num_blocks)
        lane.offer(outgoing, first_block=0, num_blocks=num_blocks)
        lane.commit(outgoing, num_blocks=num_blocks, first_tokens=FIRST)
        assert await received is None
        everything = tokens(
            pair.receive_memory, incoming.lease.block_ids, num_blocks * LAYOUT.block_size
        )
        assert everything[:num_tokens].any(axis=(1, 2, 3, 4)).all()
        assert not everything[num_tokens:].any()
