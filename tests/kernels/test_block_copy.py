"""Block moves against indexing by hand."""

import torch

from kernels.block_copy import copy_blocks, pack_blocks, unpack_blocks


def test_pack_and_unpack_keep_order_and_leave_the_rest() -> None:
    pool = torch.arange(12.0).view(6, 2)
    staging = torch.full((4, 2), -1.0)
    pack_blocks(pool, block_K=torch.tensor([5, 0]), staging=staging)
    assert staging.tolist() == [[10, 11], [0, 1], [-1, -1], [-1, -1]]
    unpack_blocks(pool, block_K=torch.tensor([1, 3]), staging=staging)
    assert pool.tolist() == [[0, 1], [10, 11], [4, 5], [0, 1], [8, 9], [10, 11]]


def test_copies_do_not_see_each_other() -> None:
    pool = torch.arange(4.0).view(4, 1)
    copy_blocks(pool, source_K=torch.tensor([0, 1]), target_K=torch.tensor([3, 2]))
    assert pool.flatten().tolist() == [0, 1, 1, 0]
