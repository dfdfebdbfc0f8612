"""The packed product and what is attached to it, against float64, on every instruction set."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cpu_ops import ADD, SILU_MUL, every_isa, linear, make_runner, randn

ROWS = (1, 3, 8, 12, 13, 16, 17, 64, 123)

# One rounding to bfloat16, and that of the sum.
TOLERANCE = {"rtol": 2**-7, "atol": 2e-3}
# An intermediate result that falls on the other side of a rounding is worth two more bits.
SILU_TOLERANCE = {"rtol": 2**-5, "atol": 4e-3}


def weight(num_out: int, num_in: int) -> torch.Tensor:
    return (randn(num_out, num_in, seed=1).float() * num_in**-0.5).bfloat16()


@every_isa
@pytest.mark.parametrize("shape", [(1, 2), (33, 48), (96, 33), (70, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_that_of_plain_linear(
    isa: str, shape: tuple[int, int], has_bias: bool
) -> None:
    w, bias = weight(*shape), randn(shape[0], seed=2) if has_bias else None
    with make_runner(isa) as runner:
        for num_rows in ROWS:
            x = randn(num_rows, shape[1])
            expected = F.linear(x.double(), w.double(), None if bias is None else bias.double())
            y = linear(runner, x, w, bias)
            torch.testing.assert_close(y.double(), expected, **TOLERANCE)


@every_isa
def test_the_product_is_added_to_the_residual(isa: str) -> None:
    w, residual, x = weight(41, 65), randn(123, 41, seed=3), randn(123, 65)
    with make_runner(isa) as runner:
        total = linear(runner, x, w, kind=ADD, residual_TO=residual)
    expected = residual.double() + F.linear(x.double(), w.double())
    torch.testing.assert_close(total.double(), expected, **TOLERANCE)


@every_isa
@pytest.mark.parametrize("inner", [1, 16, 17, 88])
@pytest.mark.parametrize("has_bias", [False, True])
def test_silu_of_gate_times_up(isa: str, inner: int, has_bias: bool) -> None:
    w, bias = weight(2 * inner, 48) * 4, randn(2 * inner, seed=2) if has_bias else None
    with make_runner(isa) as runner:
        for num_rows in ROWS:
            x = randn(num_rows, 48)
            gate, up = F.linear(x.float(), w.float()).chunk(2, dim=-1)
            if bias is not None:
                gate, up = gate + bias[:inner].float(), up + bias[inner:].float()
            y = linear(runner, x, w, bias, kind=SILU_MUL)
            expected = F.silu(gate.bfloat16()) * up.bfloat16()
            torch.testing.assert_close(y, expected, **SILU_TOLERANCE)


@every_isa
def test_silu_of_a_very_negative_gate_is_zero_and_of_a_large_one_itself(isa: str) -> None:
    w = torch.tensor([[1.0], [0.0]]).bfloat16()
    bias = torch.tensor([0.0, 1.0]).bfloat16()
    x = torch.tensor([[-3e38], [-1000.0], [-100.0], [0.0], [100.0], [3e38]]).bfloat16()
    with make_runner(isa) as runner:
        y = linear(runner, x, w, bias, kind=SILU_MUL).flatten()
    torch.testing.assert_close(y, F.relu(x).flatten(), rtol=0, atol=1e-30)


@every_isa
def test_a_row_has_the_same_bits_whoever_is_in_the_batch(isa: str) -> None:
    w, x = weight(130, 96), randn(1300, 96)
    with make_runner(isa) as runner:
        alone = torch.cat([linear(runner, row[None], w) for row in x[:40]])
        for num_rows in (2, *ROWS[1:], 1300):
            together = linear(runner, x[:num_rows], w)
            assert torch.equal(together[:40], alone[: min(40, num_rows)])


@every_isa
def test_threads_share_the_work_and_change_nothing(isa: str) -> None:
    w, x = weight(130, 96), randn(300, 96)
    with make_runner(isa) as one, make_runner(isa, num_threads=3) as three:
        for num_rows in (1, 16, 300):
            assert torch.equal(linear(one, x[:num_rows], w), linear(three, x[:num_rows], w))
