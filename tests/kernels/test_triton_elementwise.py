"""The other Triton kernels, interpreted, against their torch references."""

import pytest
import torch

from kernels import block_copy, rms_norm, rope_and_cache_write, silu_and_mul

pytest.importorskip("triton")

# Rounded where the reference rounds: what is left is the last bit, of sums in another order. The
# interpreter's bfloat16 is cut off, not rounded, so there it is the last two.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 4e-2}
DTYPES = list(TOLERANCE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    tolerance = TOLERANCE[reference.dtype]
    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (17, 48), (3, 2049), (0, 8)])
def test_rms_norm_with_and_without_the_add(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    from kernels.triton import rms_norm as fast

    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    weight = randn(shape[1], dtype=dtype, seed=2)
    close(fast.rms_norm(x, weight, eps=1e-5), rms_norm.rms_norm(x, weight, eps=1e-5))
    ours = fast.add_rms_norm(x, residual, weight, eps=1e-5)
    for mine, theirs in zip(
        ours, rms_norm.add_rms_norm(x, residual, weight, eps=1e-5), strict=True
    ):
        close(mine, theirs)


@pytest.mark.parametrize("head_dim", [10, 80, 128])
def test_rms_norm_of_heads_that_are_a_view_with_a_weight_each(head_dim: int) -> None:
    from kernels.triton import rms_norm as fast

    x = randn(5, 11, head_dim)[:, :8]
    weight = randn(8, head_dim, seed=1)
    close(fast.rms_norm(x, weight, eps=1e-6), rms_norm.rms_norm(x, weight, eps=1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1025), (123, 7), (0, 4)])
def test_silu_and_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    from kernels.triton import silu_and_mul as fast

    gate_up = 20 * randn(shape[0], 2 * shape[1], dtype=dtype)
    close(fast.silu_and_mul(gate_up), silu_and_mul.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((1, 1), 64), ((9, 3), 80), ((8, 1), 256)])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_rope_and_cache_write(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    from kernels.triton import rope_and_cache_write as fast

    num_tokens, (num_query_heads, num_kv_heads) = 7, heads
    qkv = randn(num_tokens, num_query_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = randn(num_tokens, head_dim // 2, seed=1)
    slots = torch.randperm(9 * block_size, generator=torch.Generator().manual_seed(2))[:num_tokens]
    pools = [torch.full((9, 2, 2, num_kv_heads, block_size, head_dim), -7.0, dtype=dtype)] * 2
    pools[1] = pools[1].clone()
    out = [
        op.rope_and_cache_write(
            qk_TAD=qkv[:, : num_query_heads + num_kv_heads],
            v_THD=qkv[:, num_query_heads + num_kv_heads :],
            cos_TF=angles.cos().to(dtype),
            sin_TF=angles.sin().to(dtype),
            pool=pool,
            layer=1,
            block_T=(slots // block_size).int(),
            slot_T=(slots % block_size).int(),
        )
        for op, pool in zip((fast, rope_and_cache_write), pools, strict=True)
    ]
    close(out[0], out[1])
    close(pools[0], pools[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 2, 3, 123)])
def test_blocks_move_whole(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from kernels.triton import block_copy as fast

    source_K, target_K = torch.tensor([4, 0, 7]), torch.tensor([1, 6, 5])
    start = (100 * randn(8, *shape)).to(dtype)
    results = []
    for op in (fast, block_copy):
        pool, staging = start.clone(), torch.zeros(5, *shape, dtype=dtype)
        op.pack_blocks(pool, block_K=source_K, staging=staging)
        op.copy_blocks(pool, source_K=source_K, target_K=target_K)
        packed = staging.clone()
        staging[:3] += 1
        op.unpack_blocks(pool, block_K=torch.tensor([2, 3, 0]), staging=staging)
        results.append((pool, packed))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_no_blocks_are_no_launch() -> None:
    from kernels.triton import block_copy as fast

    pool = torch.zeros(2, 3)
    none = torch.tensor([], dtype=torch.int64)
    fast.copy_blocks(pool, source_K=none, target_K=none)
