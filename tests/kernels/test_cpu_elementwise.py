"""C++ norm, rotary embedding and argmax against the torch ops, roundings included."""

import pytest
import torch

from kernels.rms_norm import rms_norm as torch_rms_norm
from kernels.rope_and_cache_write import apply_rope
from tests.kernels import cpu_ops
from tests.kernels.cpu_ops import every_isa, make_runner, randn


@every_isa
@pytest.mark.parametrize("size", [2, 31, 32, 48, 576])
def test_rms_norm_is_that_of_torch_to_a_rounding(isa: str, size: int) -> None:
    x, weight = randn(5, size) * 3, 1 + randn(size, seed=1) * 0.2
    with make_runner(isa) as runner:
        y = cpu_ops.rms_norm(runner, x, weight, eps=1e-5)
    torch.testing.assert_close(y, torch_rms_norm(x, weight, eps=1e-5), rtol=2**-7, atol=0)


@every_isa
@pytest.mark.parametrize("head_dim", [2, 10, 64, 80, 96, 128, 256])
def test_rotate_is_that_of_torch_to_the_bit(isa: str, head_dim: int) -> None:
    x_D = randn(head_dim)
    angles_F = torch.linspace(-7, 7, head_dim // 2)
    cos_F, sin_F = angles_F.cos().bfloat16(), angles_F.sin().bfloat16()
    with make_runner(isa) as runner:
        y_D = cpu_ops.rotate(runner, x_D, cos_F, sin_F)
    expected = apply_rope(x_D[None, None], cos_TF=cos_F[None], sin_TF=sin_F[None])
    assert torch.equal(y_D, expected[0, 0])


@every_isa
@pytest.mark.parametrize("size", [1, 31, 512, 513, 49_152])
def test_argmax_is_the_lowest_id_of_the_highest_logit(isa: str, size: int) -> None:
    with make_runner(isa) as runner:
        for seed in range(5):
            logits_V = randn(size, seed=seed) - 10.0 * (seed % 2)
            expected = int(logits_V.float().max(dim=0).indices)
            assert logits_V[cpu_ops.argmax(runner, logits_V)] == logits_V[expected]
            assert cpu_ops.argmax(runner, logits_V) == int(
                (logits_V == logits_V[expected]).nonzero()[0]
            )


@every_isa
def test_argmax_says_so_if_there_is_no_finite_maximum(isa: str) -> None:
    nan, inf = float("nan"), float("inf")
    with make_runner(isa) as runner:
        for bad in ([1.0, nan], [-nan, 2.0], [inf, 0.0], [-inf, -inf]):
            assert cpu_ops.argmax(runner, torch.tensor(bad).bfloat16()) == -1
        assert cpu_ops.argmax(runner, torch.tensor([-inf, -3.0]).bfloat16()) == 1
        assert cpu_ops.argmax(runner, torch.tensor([-0.0, 0.0, -1.0]).bfloat16()) == 0
