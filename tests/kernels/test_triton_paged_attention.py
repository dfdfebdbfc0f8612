"""The Triton attention kernel, interpreted, against the formula in float64.

float16 stands for the 16-bit dtypes: the interpreter multiplies bfloat16 as if it were integers.
"""

import warnings
from typing import Any

import pytest
import torch

from bench.attention_case import make_case

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def check(
    rows: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_splits: int | None = None,
    **options: Any,
) -> None:
    from kernels.triton.paged_attention import paged_attention

    case = make_case(rows, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    with warnings.catch_warnings():
        # tanh's exp may overflow, to the right answer.
        warnings.filterwarnings("ignore", "overflow", RuntimeWarning)
        out_TND = paged_attention(
            case.q_TND,
            pool=case.pool,
            layer=case.layer,
            rows=case.packed(),
            num_splits=num_splits,
            **options,
        )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        out_TND.double(), case.expected(**options), rtol=tolerance, atol=tolerance
    )


MIXED = [(1, 0), (5, 0), (1, 14), (1, 15), (0, 0), (1, 16), (3, 14), (1, 122), (45, 17)]


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)])
def test_decode_rows_and_chunks_mix(heads: tuple[int, int]) -> None:
    check(MIXED, heads=heads)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_head_dims_that_are_no_power_of_two_are_padded(head_dim: int, dtype: torch.dtype) -> None:
    check([(1, 122), (17, 3)], heads=(3, 1), head_dim=head_dim, dtype=dtype, num_splits=2)


@pytest.mark.parametrize("block_size", [1, 5, 16, 123])
def test_blocks_need_not_divide_the_tile(block_size: int) -> None:
    check([(1, 0), (1, 40), (17, 3)], heads=(3, 1), block_size=block_size)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 16])
def test_splits_merge_also_where_most_are_empty(num_splits: int) -> None:
    check([(1, 0), (1, 199), (1, 70)], heads=(3, 1), num_splits=num_splits)


@pytest.mark.parametrize("window", [1, 7, 16, 33, 1000])
def test_a_window_hides_what_is_before_it(window: int) -> None:
    check([(1, 0), (1, 60), (1, 122), (45, 17)], heads=(3, 1), window=window, num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_soft_cap_and_sinks(num_splits: int) -> None:
    sinks_N = torch.tensor([-30.0, 0.0, 0.5, 2.0, 9.0, 60.0])
    rows = [(1, 0), (1, 122), (9, 17)]
    check(rows, soft_cap=0.8, num_splits=num_splits)
    check(rows, sinks_N=sinks_N, num_splits=num_splits)
    check(rows, sinks_N=sinks_N, soft_cap=3.0, window=5, num_splits=num_splits)


def test_a_padding_row_gives_zeros_whatever_the_pool_holds() -> None:
    from kernels.packed_rows import AttentionRow, pack_rows
    from kernels.triton.paged_attention import paged_attention

    pool = torch.full((2, 1, 2, 1, 4, 64), float("nan"))
    row = AttentionRow(first_token=0, num_tokens=1, context_len=0, block_table=())
    rows = pack_rows([row], block_size=4, device=pool.device)
    q_TND = torch.ones(1, 2, 64)
    for num_splits in (1, 8):
        out_TND = paged_attention(q_TND, pool=pool, layer=0, rows=rows, num_splits=num_splits)
        assert torch.equal(out_TND, torch.zeros_like(q_TND))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (16, 2)])
@pytest.mark.parametrize("block_size", [1, 16, 17])
def test_the_whole_grid(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int], block_size: int
) -> None:
    check(MIXED, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    check(MIXED, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, window=7)
