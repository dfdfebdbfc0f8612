"""Rotary embedding and KV write in Triton: Q, K and V are read once and land where they belong.

    program (token, HEADS heads of Q, K and V):  q -> rotated -> q_TND
                                                 k -> rotated -> pool[block, layer, 0, :, slot]
                                                 v ------------> pool[block, layer, 1, :, slot]

The formula, and what is rounded when, are in kernels/rope_and_cache_write.py.
Suffixes: T packed tokens, N query heads, H kv heads, A = N + H, D head dim, F half of it, P heads
of a program.
"""

import torch
import triton
import triton.language as tl

# Elements of a half head, times heads, of a program: enough for four warps.
_TILE = 512


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
    """kernels.rope_and_cache_write.rope_and_cache_write; Q, K and V may be views of one tensor."""
    num_tokens, num_qk_heads, head_dim = qk_TAD.shape
    num_kv_heads = v_THD.shape[1]
    q_TND = qk_TAD.new_empty(num_tokens, num_qk_heads - num_kv_heads, head_dim)
    if num_tokens == 0:
        return q_TND
    assert qk_TAD.stride()[1:] == v_THD.stride()[1:] == (head_dim, 1)
    assert cos_TF.is_contiguous() and sin_TF.is_contiguous()
    block_f = triton.next_power_of_2(head_dim // 2)
    heads = max(1, _TILE // block_f)
    layer_pool = pool[:, layer]
    _rope_and_cache_write[(num_tokens, triton.cdiv(num_qk_heads + num_kv_heads, heads))](
        qk_TAD,
        v_THD,
        cos_TF,
        sin_TF,
        q_TND,
        layer_pool[:, 0],
        layer_pool[:, 1],
        block_T,
        slot_T,
        qk_TAD.stride(0),
        v_THD.stride(0),
        pool.stride(0),
        NUM_QUERY_HEADS=num_qk_heads - num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=pool.shape[4],
        HALF=head_dim // 2,
        HEADS=heads,
        BLOCK_F=block_f,
        num_warps=4,
    )
    return q_TND


@triton.jit(do_not_specialize_on_alignment=["block_ptr", "slot_ptr"])
def _rope_and_cache_write(
    qk_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    block_ptr,
    slot_ptr,
    qk_stride,
    v_stride,
    block_stride,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_P = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    f = tl.arange(0, BLOCK_F)
    is_half = (f < HALF)[None, :]
    is_q_P = head_P < NUM_QUERY_HEADS
    is_qk_P = head_P < NUM_QUERY_HEADS + NUM_KV_HEADS
    is_v_P = ~is_qk_P & (head_P < NUM_QUERY_HEADS + 2 * NUM_KV_HEADS)
    v_head_P = head_P - NUM_QUERY_HEADS - NUM_KV_HEADS

    in_PF = head_P[:, None] * (2 * HALF) + f[None, :]
    qk_mask = is_qk_P[:, None] & is_half
    a_PF = tl.load(qk_ptr + token * qk_stride + in_PF, mask=qk_mask, other=0.0)
    b_PF = tl.load(qk_ptr + token * qk_stride + in_PF + HALF, mask=qk_mask, other=0.0)
    dtype = a_PF.dtype
    cos_F = tl.load(cos_ptr + token * HALF + f, mask=f < HALF, other=0.0).to(tl.float32)
    sin_F = tl.load(sin_ptr + token * HALF + f, mask=f < HALF, other=0.0).to(tl.float32)
    a32_PF, b32_PF = a_PF.to(tl.float32), b_PF.to(tl.float32)
    a_cos_PF = (a32_PF * cos_F[None, :]).to(dtype).to(tl.float32)
    b_sin_PF = (b32_PF * sin_F[None, :]).to(dtype).to(tl.float32)
    b_cos_PF = (b32_PF * cos_F[None, :]).to(dtype).to(tl.float32)
    a_sin_PF = (a32_PF * sin_F[None, :]).to(dtype).to(tl.float32)
    first_PF = (a_cos_PF - b_sin_PF).to(dtype)
    second_PF = (b_cos_PF + a_sin_PF).to(dtype)

    q_PF = q_ptr + token * (NUM_QUERY_HEADS * 2 * HALF) + in_PF
    q_mask = is_q_P[:, None] & is_half
    tl.store(q_PF, first_PF, mask=q_mask)
    tl.store(q_PF + HALF, second_PF, mask=q_mask)

    slot = tl.load(slot_ptr + token)
    pool_offset = tl.load(block_ptr + token).to(tl.int64) * block_stride
    k_row_P = (head_P - NUM_QUERY_HEADS) * BLOCK_SIZE + slot
    k_PF = k_pool_ptr + pool_offset + k_row_P[:, None] * (2 * HALF) + f[None, :]
    k_mask = (is_qk_P & ~is_q_P)[:, None] & is_half
    tl.store(k_PF, first_PF, mask=k_mask)
    tl.store(k_PF + HALF, second_PF, mask=k_mask)

    v_mask = is_v_P[:, None] & is_half
    v_in_PF = v_ptr + token * v_stride + v_head_P[:, None] * (2 * HALF) + f[None, :]
    v_row_P = v_head_P * BLOCK_SIZE + slot
    v_PF = v_pool_ptr + pool_offset + v_row_P[:, None] * (2 * HALF) + f[None, :]
    tl.store(v_PF, tl.load(v_in_PF, mask=v_mask), mask=v_mask)
    tl.store(v_PF + HALF, tl.load(v_in_PF + HALF, mask=v_mask), mask=v_mask)
