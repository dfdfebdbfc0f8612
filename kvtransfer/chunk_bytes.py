"""The bytes of a chunk: their digest, the end that nobody filled, and how they become our blocks.

    sender's blocks, sender's layout --write_chunk--> the lease's blocks, our layout

    tokens     0  1  2  3 | 4  5  6  7 | 8  9      sender: 4 tokens per block, 3 blocks
    tokens     0  1  2  3  4  5  6  7  8  9  .  .  ours: 16 per block: read, patch, write

Equal layouts are one copy. Else every block is seen as [S, L, 2, H, D] words of the dtype's width,
whatever its inner order, and tokens are copied from view to view; a block of ours that the chunk
covers only in part is read first. Runs on the lane's thread, which has the blocks claimed.

Letters: K blocks of a chunk, S slots of a block, L layers, H kv heads, D head dim.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvtransfer.layout import DTYPE_BYTES, KvLayout
from kvtransfer.memory import KvMemory

_WORDS = {2: np.uint16, 4: np.uint32}
Words = npt.NDArray[Any]


def digest(views: Iterable[memoryview]) -> int:
    """XXH3-64 over the views, one after the other."""
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view)
    return hasher.intdigest()


def zero_tail(block: memoryview, layout: KvLayout, *, num_tokens_in_block: int) -> memoryview:
    """A copy of block whose slots from num_tokens_in_block on are zero.

    What lies there was another request's, and is not sent.
    """
    assert 0 <= num_tokens_in_block <= layout.block_size
    blocks = np.frombuffer(bytearray(block), dtype=np.uint8)
    (block_SL2HD,) = _by_slot(blocks, layout)
    block_SL2HD[num_tokens_in_block:] = 0
    return blocks.data


def touched_blocks(
    ours: KvLayout,
    *,
    theirs: KvLayout,
    first_block: int,
    num_blocks: int,
    num_tokens: int,
    num_cached_tokens: int = 0,
) -> range:
    """Indexes into a lease's block_ids of what write_chunk writes."""
    tokens = _tokens(theirs, first_block, num_blocks, num_tokens, num_cached_tokens)
    return range(tokens.start // ours.block_size, ours.blocks_for(tokens.stop))


def write_chunk(
    memory: KvMemory,
    block_ids: Sequence[int],
    data: memoryview,
    *,
    theirs: KvLayout,
    first_block: int,
    num_blocks: int,
    num_tokens: int,
    num_cached_tokens: int = 0,
) -> None:
    """Puts the sender's blocks [first_block, first_block + num_blocks) into ours.

    block_ids are all blocks of the transfer's lease, in the order of its num_tokens tokens. Behind
    the last token there are zeros then, or, where the layouts are equal, what the sender sent.
    The first num_cached_tokens, whole blocks of ours, are here: others may share them, and they are
    left alone, also where the sender's blocks are cut otherwise and hold some of them.
    The caller has touched_blocks(...) under a write. Raises ValueError for data of another size.
    """
    if data.nbytes != num_blocks * theirs.block_bytes:
        raise ValueError(f"data: {data.nbytes} bytes for {num_blocks} blocks")
    ours = memory.layout
    tokens = _tokens(theirs, first_block, num_blocks, num_tokens, num_cached_tokens)
    touched = touched_blocks(
        ours,
        theirs=theirs,
        first_block=first_block,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        num_cached_tokens=num_cached_tokens,
    )
    touched_ids = [block_ids[index] for index in touched]
    if ours == theirs:
        memory.write(touched_ids, data)
        return
    target = np.empty(len(touched) * ours.block_bytes, dtype=np.uint8)
    _read_partly_covered(memory, target, block_ids=block_ids, touched=touched, tokens=tokens)
    _copy_tokens(
        _by_slot(target, ours),
        _by_slot(np.frombuffer(data, dtype=np.uint8), theirs),
        tokens=tokens,
        first_target=touched.start,
        first_source=first_block,
    )
    _zero_behind(_by_slot(target, ours), first_target=touched.start, num_tokens=num_tokens)
    memory.write(touched_ids, target.data)


def _tokens(
    layout: KvLayout, first_block: int, num_blocks: int, num_tokens: int, num_cached_tokens: int
) -> range:
    """The tokens that these blocks of the layout hold, but for those that are cached."""
    size = layout.block_size
    first = max(first_block * size, num_cached_tokens)
    return range(first, min((first_block + num_blocks) * size, num_tokens))


def _by_slot(blocks: npt.NDArray[np.uint8], layout: KvLayout) -> Words:
    """Bytes of blocks as words [K, S, L, 2, H, D]: a view, whatever the inner order."""
    words = blocks.view(_WORDS[DTYPE_BYTES[layout.dtype]])
    axes = [1 + layout.inner_order.index(letter) for letter in "SL2HD"]
    return words.reshape(-1, *layout.inner_shape).transpose(0, *axes)


def _read_partly_covered(
    memory: KvMemory,
    target: npt.NDArray[np.uint8],
    *,
    block_ids: Sequence[int],
    touched: range,
    tokens: range,
) -> None:
    """Fills in the touched blocks that keep some of what they have: the first, the last or none."""
    size, size_bytes = memory.layout.block_size, memory.layout.block_bytes
    kept = [
        index
        for index in {touched[0], touched[-1]}
        if index * size < tokens.start or (index + 1) * size > tokens.stop
    ]
    if not kept:
        return
    with memory.reading([block_ids[index] for index in kept]) as views:
        for index, view in zip(kept, views, strict=True):
            offset = (index - touched.start) * size_bytes
            target[offset : offset + size_bytes] = np.frombuffer(view, dtype=np.uint8)


def _zero_behind(target_KSL2HD: Words, *, first_target: int, num_tokens: int) -> None:
    """What another request left in the last token's block, if that is in target."""
    block, slot = divmod(num_tokens, target_KSL2HD.shape[1])
    if 0 <= block - first_target < target_KSL2HD.shape[0]:
        target_KSL2HD[block - first_target, slot:] = 0


def _copy_tokens(
    target_KSL2HD: Words,
    source_KSL2HD: Words,
    *,
    tokens: range,
    first_target: int,
    first_source: int,
) -> None:
    """In runs of tokens that cross no block's end on either side."""
    target_size, source_size = target_KSL2HD.shape[1], source_KSL2HD.shape[1]
    token = tokens.start
    while token < tokens.stop:
        target, target_slot = divmod(token, target_size)
        source, source_slot = divmod(token, source_size)
        count = min(target_size - target_slot, source_size - source_slot, tokens.stop - token)
        target_KSL2HD[target - first_target, target_slot : target_slot + count] = source_KSL2HD[
            source - first_source, source_slot : source_slot + count
        ]
        token += count
