"""Whole KV blocks, moved: inside the pool, out of it into a staging buffer, and back.

    copy_blocks     pool[target_i] = pool[source_i]
    pack_blocks     staging[i] = pool[block_i]
    unpack_blocks   pool[block_i] = staging[i]

A block is contiguous, so it moves as bytes: the dtype does not matter. Suffixes: K blocks moved.
"""

import torch

from kernels.dispatch import on_gpu


def copy_blocks(pool: torch.Tensor, *, source_K: torch.Tensor, target_K: torch.Tensor) -> None:
    """Block source_K[i] over block target_K[i]; no block may be both a source and a target."""
    if on_gpu(pool):
        from kernels.triton import block_copy as fast

        fast.copy_blocks(pool, source_K=source_K, target_K=target_K)
        return
    pool[target_K] = pool[source_K]


def pack_blocks(pool: torch.Tensor, *, block_K: torch.Tensor, staging: torch.Tensor) -> None:
    """The blocks, in order, to the front of staging, which has the pool's block shape."""
    if on_gpu(pool):
        from kernels.triton import block_copy as fast

        fast.pack_blocks(pool, block_K=block_K, staging=staging)
        return
    staging[: block_K.shape[0]] = pool[block_K]


def unpack_blocks(pool: torch.Tensor, *, block_K: torch.Tensor, staging: torch.Tensor) -> None:
    """The front of staging over the blocks, in order; no block may be named twice."""
    if on_gpu(pool):
        from kernels.triton import block_copy as fast

        fast.unpack_blocks(pool, block_K=block_K, staging=staging)
        return
    pool[block_K] = staging[: block_K.shape[0]]
