"""rms_norm, silu_and_mul and rope_and_cache_write against transformers, bit for bit."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels.rms_norm import rms_norm
from kernels.rope_and_cache_write import rope_and_cache_write
from kernels.silu_and_mul import silu_and_mul

DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (17, 48), (5, 3, 10)])
def test_rms_norm_rounds_where_transformers_rounds(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    reference = LlamaRMSNorm(shape[-1], eps=1e-5)
    reference.weight.data = randn(shape[-1], dtype=dtype, seed=1)
    x = randn(*shape, dtype=dtype)
    assert torch.equal(rms_norm(x, reference.weight.data, eps=1e-5), reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 123])
def test_silu_and_mul_gates_the_second_half_with_the_first(
    dtype: torch.dtype, num_tokens: int
) -> None:
    gate_up = randn(num_tokens, 14, dtype=dtype)
    expected = torch.nn.functional.silu(gate_up[:, :7]) * gate_up[:, 7:]
    assert torch.equal(silu_and_mul(gate_up), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_rotates_as_transformers_does_and_writes_only_its_slots(dtype: torch.dtype) -> None:
    q, k, v = (randn(3, heads, 8, dtype=dtype, seed=heads) for heads in (6, 2, 2))
    angles = randn(3, 4)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    full_cos, full_sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    q_expected, k_expected = apply_rotary_pos_emb(q, k, full_cos, full_sin, unsqueeze_dim=1)
    pool = torch.full((4, 2, 2, 2, 5, 8), -7.0, dtype=dtype)
    q_out = rope_and_cache_write(
        qk_TAD=torch.cat((q, k), dim=1),
        v_THD=v,
        cos_TF=cos,
        sin_TF=sin,
        pool=pool,
        layer=1,
        block_T=torch.tensor([3, 0, 3]),
        slot_T=torch.tensor([4, 2, 0]),
    )
    assert torch.equal(q_out, q_expected)
    for token, (block, slot) in enumerate([(3, 4), (0, 2), (3, 0)]):
        assert torch.equal(pool[block, 1, 0, :, slot], k_expected[token])
        assert torch.equal(pool[block, 1, 1, :, slot], v[token])
        pool[block, 1, :, :, slot] = -7.0
    assert (pool == -7.0).all()
