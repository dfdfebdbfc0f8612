"""Rotary embedding of Q and K, and K and V into their slots of the block pool.

    [a, b] the halves of a head:  rotated([a, b]) = [a * cos - b * sin, b * cos + a * sin]
    pool[block, layer, 0, :, slot] = rotated(k);  pool[block, layer, 1, :, slot] = v

Q and K come as one tensor, because a projection makes them so and rotating them once is cheaper.

Suffixes: T packed tokens, N query heads, H kv heads, A = N + H, D head dim, F half of it. The pool
is block-major: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
"""

import torch

from kernels.dispatch import on_gpu


def rope_and_cache_write(
    *,
    qk_TAD: torch.Tensor,
    v_THD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_T: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """Returns rotated q_TND, new; writes token t's K and V at (block_T[t], slot_T[t]).

    No two tokens may share a (block, slot) whose content matters.
    """
    if on_gpu(qk_TAD):
        from kernels.triton import rope_and_cache_write as fast

        return fast.rope_and_cache_write(
            qk_TAD=qk_TAD,
            v_THD=v_THD,
            cos_TF=cos_TF,
            sin_TF=sin_TF,
            pool=pool,
            layer=layer,
            block_T=block_T,
            slot_T=slot_T,
        )
    num_query_heads = qk_TAD.shape[1] - v_THD.shape[1]
    rotated_TAD = apply_rope(qk_TAD, cos_TF=cos_TF, sin_TF=sin_TF)
    k_pool, v_pool = pool[:, layer].unbind(1)
    k_pool[block_T, :, slot_T] = rotated_TAD[:, num_query_heads:]
    v_pool[block_T, :, slot_T] = v_THD
    return rotated_TAD[:, :num_query_heads]


def apply_rope(x_TAD: torch.Tensor, *, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """x_TAD rotated by its tokens' angles, every product rounded to its dtype; a new tensor."""
    first, second = x_TAD.chunk(2, dim=-1)
    cos_T1F, sin_T1F = cos_TF[:, None], sin_TF[:, None]
    # Halves are updated in place: at 256 tokens the temporaries of the textbook form cost more
    # than the arithmetic.
    out_TAD = torch.empty_like(x_TAD, memory_format=torch.contiguous_format)
    out_first, out_second = out_TAD.chunk(2, dim=-1)
    torch.mul(first, cos_T1F, out=out_first).sub_(second * sin_T1F)
    torch.mul(second, cos_T1F, out=out_second).add_(first * sin_T1F)
    return out_TAD
