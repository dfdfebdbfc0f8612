"""The configurations of the attention kernel: a small space per use, the chosen one first.

Nothing here depends on the machine: two nodes with the same model add up in the same order.
"""

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One configuration of the kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tiles(group_size: int, head_dim: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """The space for rows of one query, the chosen tile first."""
    block_m = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        return (Tile(block_m=block_m, block_n=16, num_warps=4, num_stages=1),)
    wide = head_dim > 128
    return tuple(
        Tile(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
        for block_n, num_warps, num_stages in (
            (32 if wide else 64, 4, 3),
            (32 if wide else 64, 4, 2),
            (64 if wide else 128, 4, 2),
            (32, 2, 3),
        )
    )


def chunk_tiles(
    group_size: int, head_dim: int, dtype: torch.dtype, *, has_options: bool = False
) -> tuple[Tile, ...]:
    """The space for rows of many queries, the chosen tile first.

    has_options: a window, a soft cap or sinks. With them the wider tiles spill on sm_80 or sm_100.
    """
    block_m = max(64, 2 * triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        # Exact float32 products are made of scalar ones: larger tiles do not fit the registers.
        return (Tile(block_m=block_m // 2, block_n=16, num_warps=8, num_stages=1),)
    shapes = [(128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 3)]
    if head_dim > 128:
        shapes = [(64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2)]
    elif has_options:
        shapes = [(64, 64, 8, 2), *shapes]
    return tuple(
        Tile(block_m=block_m * rows // 64, block_n=block_n, num_warps=num_warps, num_stages=stages)
        for rows, block_n, num_warps, stages in shapes
    )
