"""Whole KV blocks moved on the device, in Triton: one kernel, as wide words as the block allows.

    program (i, part):  BLOCK words of block source_i -> the same words of block target_i
                        where a side is a staging buffer, its i-th block is meant

What each function does is in kernels/block_copy.py. Suffixes: K blocks moved.
"""

import torch
import triton
import triton.language as tl

# Words of a program: 16 KiB of 64-bit words, 16 bytes per thread and access.
_BLOCK = 2048


def copy_blocks(pool: torch.Tensor, *, source_K: torch.Tensor, target_K: torch.Tensor) -> None:
    """kernels.block_copy.copy_blocks."""
    _launch(pool, pool, source_K, target_K, source_K.shape[0])


def pack_blocks(pool: torch.Tensor, *, block_K: torch.Tensor, staging: torch.Tensor) -> None:
    """kernels.block_copy.pack_blocks; both tensors are on the device."""
    _launch(pool, staging, block_K, None, block_K.shape[0])


def unpack_blocks(pool: torch.Tensor, *, block_K: torch.Tensor, staging: torch.Tensor) -> None:
    """kernels.block_copy.unpack_blocks; both tensors are on the device."""
    _launch(staging, pool, None, block_K, block_K.shape[0])


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    source_K: torch.Tensor | None,
    target_K: torch.Tensor | None,
    num_blocks: int,
) -> None:
    if num_blocks == 0:
        return
    source_words, target_words = _words(source), _words(target)
    size = source_words.shape[1]
    assert target_words.shape[1] == size and target_words.dtype == source_words.dtype
    _move[(num_blocks, triton.cdiv(size, _BLOCK))](
        source_words,
        target_words,
        source_K if source_K is not None else target_K,
        target_K if target_K is not None else source_K,
        SIZE=size,
        INDEXES_SOURCE=source_K is not None,
        INDEXES_TARGET=target_K is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def _words(blocks: torch.Tensor) -> torch.Tensor:
    """[number of blocks, words of a block], a view."""
    flat = blocks.view(blocks.shape[0], -1)
    size_bytes = flat.shape[1] * flat.element_size()
    for word in (torch.int64, torch.int32, torch.int16):
        if size_bytes % word.itemsize == 0 and flat.data_ptr() % word.itemsize == 0:
            return flat.view(word)
    return flat.view(torch.uint8)


@triton.jit(do_not_specialize_on_alignment=["source_index_ptr", "target_index_ptr"])
def _move(
    source_ptr,
    target_ptr,
    source_index_ptr,
    target_index_ptr,
    SIZE: tl.constexpr,
    INDEXES_SOURCE: tl.constexpr,
    INDEXES_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.program_id(0)
    source = i.to(tl.int64)
    target = i.to(tl.int64)
    if INDEXES_SOURCE:
        source = tl.load(source_index_ptr + i).to(tl.int64)
    if INDEXES_TARGET:
        target = tl.load(target_index_ptr + i).to(tl.int64)
    mask = word < SIZE
    words = tl.load(source_ptr + source * SIZE + word, mask=mask)
    tl.store(target_ptr + target * SIZE + word, words, mask=mask)
