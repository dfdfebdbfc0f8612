"""Packed linears against the plain product, for every form that a CPU may choose."""

import pytest
import torch
import torch.nn.functional as F

from kernels import linear
from kernels.linear import Linear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3), (31, 48), (96, 33), (20_001, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_the_product_is_that_of_plain_linear(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, int],
    has_bias: bool,
    packs: bool,
) -> None:
    if not packs:
        monkeypatch.setattr(linear, "_can_pack", lambda: False)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if has_bias else None
    layer = Linear(weight, bias)
    for num_rows in (1, 2, 17):
        x = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(layer(x).double(), expected, rtol=tolerance, atol=10 * tolerance)


def test_a_view_of_rows_is_accepted() -> None:
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    x = torch.arange(24.0).view(2, 12)[:, ::2]
    torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight))
