"""A chunk's bytes between two layouts, against a reference that places one element at a time."""

import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import xxhash

from kvtransfer.chunk_bytes import digest, touched_blocks, write_chunk, zero_tail
from kvtransfer.device_memory import DeviceMemory
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory, KvMemory

LAYOUT = KvLayout(
    model="toy",
    model_digest="00",
    dtype="bfloat16",
    block_size=4,
    num_layers=2,
    num_kv_heads=3,
    head_dim=2,
)
# What was in our blocks before, and in the sender's behind its last token.
OLD, FOREIGN = 0xAA, 0xEE
SIZES = [(4, 16), (16, 4), (5, 3), (3, 5), (4, 4)]
ORDERS = [
    ("L2HSD", "L2HSD"),
    ("L2HSD", "L2SHD"),
    ("L2SHD", "L2HSD"),
    ("SL2HD", "L2HSD"),
    ("L2SHD", "DH2LS"),
]


def elements(layout: KvLayout) -> Iterator[tuple[int, int, int, int]]:
    return itertools.product(
        range(layout.num_layers), range(2), range(layout.num_kv_heads), range(layout.head_dim)
    )


def offset_of(layout: KvLayout, token: int, element: tuple[int, int, int, int]) -> int:
    """Where the element of a token begins, in bytes from the first block's begin."""
    block, slot = divmod(token, layout.block_size)
    layer, kv, head, dim = element
    index = {"L": layer, "2": kv, "H": head, "S": slot, "D": dim}
    size = {
        "L": layout.num_layers,
        "2": 2,
        "H": layout.num_kv_heads,
        "S": layout.block_size,
        "D": layout.head_dim,
    }
    position = 0
    for letter in layout.inner_order:
        position = position * size[letter] + index[letter]
    width = 4 if layout.dtype == "float32" else 2
    return block * layout.block_bytes + position * width


def value_of(layout: KvLayout, token: int, element: tuple[int, int, int, int]) -> bytes:
    """Unique per token and element."""
    layer, kv, head, dim = element
    number = token * 24 + layer * 12 + kv * 6 + head * 2 + dim + 1
    return struct.pack("<I" if layout.dtype == "float32" else "<H", number)


def filled(layout: KvLayout, *, num_blocks: int, num_tokens: int, around: int) -> bytearray:
    """Blocks with KV of num_tokens tokens, and bytes of around where no token is."""
    blocks = bytearray([around]) * (num_blocks * layout.block_bytes)
    for token in range(num_tokens):
        for element in elements(layout):
            value = value_of(layout, token, element)
            offset = offset_of(layout, token, element)
            blocks[offset : offset + len(value)] = value
    return blocks


def used_memory(layout: KvLayout, num_blocks: int) -> HostMemory:
    memory = HostMemory(layout, num_blocks)
    memory.buffer[:] = bytes([OLD]) * memory.buffer.nbytes
    return memory


def lease_of(num_blocks: int) -> list[int]:
    """Not in order, and not all of the memory."""
    return list(range(num_blocks, 0, -1))


def bytes_of(memory: KvMemory, block_ids: list[int]) -> bytes:
    with memory.reading(block_ids) as views:
        return b"".join(views)


def send(memory: KvMemory, theirs: KvLayout, *, num_tokens: int, blocks_per_chunk: int) -> bytes:
    """All chunks of the transfer, the last one first; then what the lease's blocks hold."""
    num_blocks = theirs.blocks_for(num_tokens)
    data = filled(theirs, num_blocks=num_blocks, num_tokens=num_tokens, around=FOREIGN)
    block_ids = lease_of(memory.layout.blocks_for(num_tokens))
    for first in reversed(range(0, num_blocks, blocks_per_chunk)):
        count = min(blocks_per_chunk, num_blocks - first)
        size = theirs.block_bytes
        write_chunk(
            memory,
            block_ids,
            memoryview(data)[first * size : (first + count) * size],
            theirs=theirs,
            first_block=first,
            num_blocks=count,
            num_tokens=num_tokens,
        )
    return bytes_of(memory, block_ids)


@pytest.mark.parametrize("num_tokens", [1, "bs-1", "bs", "bs+1", 123])
@pytest.mark.parametrize(("their_order", "our_order"), ORDERS)
@pytest.mark.parametrize(("their_size", "our_size"), SIZES)
def test_every_element_lands_in_its_place_and_nothing_of_another_request_stays_behind_them(
    their_size, our_size, their_order, our_order, num_tokens
):
    offset = {"bs-1": -1, "bs": 0, "bs+1": 1}.get(num_tokens)
    num_tokens = num_tokens if offset is None else our_size + offset
    theirs = replace(LAYOUT, block_size=their_size, inner_order=their_order)
    ours = replace(LAYOUT, block_size=our_size, inner_order=our_order)
    num_blocks = ours.blocks_for(num_tokens)
    memory = used_memory(ours, num_blocks + 2)
    around = FOREIGN if ours == theirs else 0
    got = send(memory, theirs, num_tokens=num_tokens, blocks_per_chunk=3)
    assert got == filled(ours, num_blocks=num_blocks, num_tokens=num_tokens, around=around)
    for outside in (0, num_blocks + 1):
        assert set(memory.block(outside)) == {OLD}


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 7, 100])
def test_words_of_four_bytes_in_chunks_of_any_size(blocks_per_chunk):
    theirs = replace(LAYOUT, dtype="float32", block_size=5)
    ours = replace(theirs, block_size=3, inner_order="L2SHD")
    memory = used_memory(ours, 10)
    got = send(memory, theirs, num_tokens=19, blocks_per_chunk=blocks_per_chunk)
    assert got == filled(ours, num_blocks=7, num_tokens=19, around=0)


def test_device_memory_takes_the_same_bytes():
    theirs = replace(LAYOUT, block_size=16, inner_order="L2SHD")
    memory = DeviceMemory(LAYOUT, 12, device=torch.device("cpu"))
    got = send(memory, theirs, num_tokens=37, blocks_per_chunk=2)
    # The device's pool begins with zeros.
    assert got == filled(LAYOUT, num_blocks=10, num_tokens=37, around=0)


@pytest.mark.parametrize(
    ("their_size", "our_size", "first_block", "num_blocks", "expected"),
    [
        (4, 16, 0, 1, range(1)),
        (4, 16, 3, 2, range(2)),
        (16, 4, 1, 1, range(4, 8)),
        (16, 4, 7, 1, range(28, 31)),  # tokens [112, 123)
        (5, 3, 1, 1, range(1, 4)),  # tokens [5, 10)
        (4, 4, 2, 3, range(2, 5)),
    ],
)
def test_touched_blocks_are_those_that_hold_a_token_of_the_chunk(
    their_size, our_size, first_block, num_blocks, expected
):
    touched = touched_blocks(
        replace(LAYOUT, block_size=our_size),
        theirs=replace(LAYOUT, block_size=their_size),
        first_block=first_block,
        num_blocks=num_blocks,
        num_tokens=123,
    )
    assert touched == expected


def test_only_touched_blocks_are_written():
    theirs, ours = replace(LAYOUT, block_size=5), replace(LAYOUT, block_size=3)
    data = filled(theirs, num_blocks=8, num_tokens=40, around=FOREIGN)
    memory = used_memory(ours, 20)
    before = bytes(memory.buffer)
    size = theirs.block_bytes
    write_chunk(
        memory,
        range(20),
        memoryview(data)[2 * size : 4 * size],
        theirs=theirs,
        first_block=2,
        num_blocks=2,
        num_tokens=40,
    )
    # Tokens [10, 20) are in blocks [3, 7).
    untouched = [index for index in range(20) if index not in range(3, 7)]
    size = ours.block_bytes
    for index in untouched:
        assert memory.block(index) == before[index * size : (index + 1) * size]


@pytest.mark.parametrize("num_cached_tokens", [0, 3, 6, 12, 39])
@pytest.mark.parametrize("their_size", [1, 3, 5, 16])
def test_blocks_that_are_cached_are_left_alone_and_the_rest_lands_behind_them(
    their_size, num_cached_tokens
):
    theirs, ours = replace(LAYOUT, block_size=their_size), replace(LAYOUT, block_size=3)
    first = num_cached_tokens // their_size
    count = theirs.blocks_for(41) - first
    data = filled(theirs, num_blocks=first + count, num_tokens=41, around=0)
    memory = used_memory(ours, 14)
    chunk = {"theirs": theirs, "first_block": first, "num_blocks": count, "num_tokens": 41}
    chunk["num_cached_tokens"] = num_cached_tokens
    assert touched_blocks(ours, **chunk) == range(num_cached_tokens // 3, 14)
    write_chunk(memory, range(14), memoryview(data)[first * theirs.block_bytes :], **chunk)
    cached_bytes = num_cached_tokens // 3 * ours.block_bytes
    expected = filled(ours, num_blocks=14, num_tokens=41, around=0)
    assert set(memory.buffer[:cached_bytes]) <= {OLD}
    assert memory.buffer[cached_bytes:] == expected[cached_bytes:]


@pytest.mark.parametrize("their_size", [4, 5])
def test_data_of_another_size_is_refused(their_size):
    theirs = replace(LAYOUT, block_size=their_size)
    memory = used_memory(LAYOUT, 4)
    with pytest.raises(ValueError, match="data: "):
        write_chunk(
            memory,
            range(4),
            memoryview(bytes(theirs.block_bytes - 2)),
            theirs=theirs,
            first_block=0,
            num_blocks=1,
            num_tokens=4,
        )
    assert set(memory.buffer) == {OLD}


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("order", ["L2HSD", "L2SHD", "SL2HD"])
def test_zero_tail_keeps_the_tokens_and_zeroes_the_rest_of_a_copy(order, num_tokens):
    layout = replace(LAYOUT, block_size=5, inner_order=order)
    block = filled(layout, num_blocks=1, num_tokens=5, around=FOREIGN)
    before = bytes(block)
    got = zero_tail(memoryview(block), layout, num_tokens_in_block=num_tokens)
    assert got == filled(layout, num_blocks=1, num_tokens=num_tokens, around=0)
    assert block == before


def test_the_digest_is_that_of_the_joined_views():
    views = [memoryview(b"abc"), memoryview(b""), memoryview(b"defgh")]
    assert digest(views) == xxhash.xxh3_64_intdigest(b"abcdefgh")
    # XXH3-64 of nothing, from the specification's reference code.
    assert digest([]) == 0x2D06800538D394C2
