"""C++ attention against the textbook, token by token; the pool is NaN where nothing is."""

import random
from dataclasses import dataclass

import pytest
import torch

from kernels.paged_attention import AttentionRow
from tests.kernels.cpu_ops import attention, every_isa, make_runner, randn

NUM_BLOCKS, NUM_LAYERS, LAYER = 300, 2, 1

# Weights and the result are rounded to bfloat16.
TOLERANCE = {"rtol": 2e-2, "atol": 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pool with the keys of some rows in it, and their queries."""

    pool: torch.Tensor
    rows: list[AttentionRow]
    q_TND: torch.Tensor
    kv: list[torch.Tensor]


def make_case(
    rows: list[tuple[int, int]], *, heads: tuple[int, int], head_dim: int, block_size: int
) -> Case:
    """rows are (queries, keys before them); heads are (query heads, kv heads)."""
    num_heads, num_kv_heads = heads
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim)
    pool = torch.full(shape, float("nan"), dtype=torch.bfloat16)
    free = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    plan_rows, kv = [], []
    first = 0
    for num_tokens, start in rows:
        context_len = start + num_tokens
        table = [free.pop() for _ in range(-(-context_len // block_size) + 1)]
        kv_2CHD = randn(2, context_len, num_kv_heads, head_dim, seed=first)
        for position in range(context_len):
            slot = pool[table[position // block_size], LAYER, :, :, position % block_size]
            slot.copy_(kv_2CHD[:, position])
        kv.append(kv_2CHD)
        plan_rows.append(
            AttentionRow(
                first_token=first,
                num_tokens=num_tokens,
                context_len=context_len,
                block_table=table,
            )
        )
        first += num_tokens
    q_TND = randn(first, num_heads, head_dim, seed=99)
    return Case(pool=pool, rows=plan_rows, q_TND=q_TND, kv=kv)


def textbook(
    case: Case, *, window: int = 0, soft_cap: float = 0.0, sinks_N: torch.Tensor | None = None
) -> torch.Tensor:
    """In float64, a query and a head at a time."""
    out_TND = torch.empty_like(case.q_TND, dtype=torch.float64)
    num_heads, head_dim = case.q_TND.shape[1:]
    for row, kv_2CHD in zip(case.rows, case.kv, strict=True):
        group = num_heads // kv_2CHD.shape[2]
        for token in range(row.num_tokens):
            end = row.context_len - row.num_tokens + token + 1
            start = max(0, end - window) if window else 0
            for head in range(num_heads):
                k_CD, v_CD = kv_2CHD[:, start:end, head // group].double()
                scores_C = k_CD @ case.q_TND[row.first_token + token, head].double()
                scores_C *= head_dim**-0.5
                if soft_cap:
                    scores_C = soft_cap * (scores_C / soft_cap).tanh()
                if sinks_N is not None:
                    scores_C = torch.cat((scores_C, sinks_N[head : head + 1].double()))
                weights_C = scores_C.softmax(0)[: end - start]
                out_TND[row.first_token + token, head] = weights_C @ v_CD
    return out_TND


def check(isa: str, case: Case, *, num_threads: int = 1, **options: object) -> None:
    with make_runner(isa, num_threads=num_threads) as runner:
        out_TND = attention(
            runner,
            case.q_TND,
            pool=case.pool,
            layer=LAYER,
            rows=case.rows,
            **options,  # type: ignore[arg-type]
        )
    expected = textbook(case, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(out_TND.double(), expected, **TOLERANCE)


@every_isa
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1), (40, 1)])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_decode_rows_and_chunks_mix(isa: str, heads: tuple[int, int], block_size: int) -> None:
    rows = [(1, 0), (5, 0), (1, 15), (1, 16), (3, 14), (1, 40), (17, 3)]
    check(isa, make_case(rows, heads=heads, head_dim=10, block_size=block_size))


@every_isa
@pytest.mark.parametrize("head_dim", [10, 64, 80, 96, 128, 256])
def test_heads_of_any_size(isa: str, head_dim: int) -> None:
    rows = [(1, 122), (13, 31), (1, 31)]
    check(isa, make_case(rows, heads=(3, 1), head_dim=head_dim, block_size=16))


@every_isa
@pytest.mark.parametrize("context", [1, 15, 16, 17, 31, 32, 33, 123])
def test_one_decode_row_of_any_length(isa: str, context: int) -> None:
    check(isa, make_case([(1, context - 1)], heads=(3, 1), head_dim=64, block_size=16))


@every_isa
def test_a_chunk_of_many_tiles_after_a_cached_prefix_on_two_threads(isa: str) -> None:
    case = make_case([(77, 123), (1, 50)], heads=(6, 2), head_dim=32, block_size=16)
    check(isa, case, num_threads=2)


@every_isa
@pytest.mark.parametrize("window", [1, 3, 32, 33, 200])
def test_a_window_hides_what_is_too_long_ago(isa: str, window: int) -> None:
    case = make_case([(1, 99), (45, 20), (1, 3)], heads=(3, 1), head_dim=16, block_size=5)
    check(isa, case, window=window)


@every_isa
def test_a_soft_cap_and_sinks(isa: str) -> None:
    case = make_case([(1, 99), (45, 20)], heads=(3, 1), head_dim=16, block_size=16)
    check(isa, case, soft_cap=2.0)
    check(isa, case, sinks_N=torch.tensor([-3.0, 0.5, 20.0]))
    check(isa, case, soft_cap=1.5, sinks_N=torch.tensor([-3.0, 0.5, 4.0]), window=40)


@every_isa
def test_scores_far_apart_give_weights_of_one_and_zero(isa: str) -> None:
    """exp underflows; what it leaves must be 0, neither NaN nor a slow denormal."""
    case = make_case([(1, 39), (20, 20)], heads=(2, 1), head_dim=8, block_size=16)
    check(isa, Case(pool=case.pool, rows=case.rows, q_TND=case.q_TND * 1000, kv=case.kv))


@every_isa
def test_a_nan_key_reaches_those_who_see_it_and_nobody_else(isa: str) -> None:
    case = make_case([(40, 0), (1, 39)], heads=(2, 1), head_dim=8, block_size=16)
    for row in case.rows:
        case.pool[row.block_table[30 // 16], LAYER, 0, :, 30 % 16, 3] = float("nan")
    with make_runner(isa) as runner:
        out = attention(runner, case.q_TND, pool=case.pool, layer=LAYER, rows=case.rows)
    is_nan_T = out.isnan().any(dim=2).any(dim=1)
    assert is_nan_T.tolist() == [False] * 30 + [True] * 11


@every_isa
@pytest.mark.parametrize("window", [0, 40])
def test_a_token_has_the_same_bits_alone_and_in_any_chunk(isa: str, window: int) -> None:
    num_tokens = 70
    case = make_case([(num_tokens, 41)], heads=(6, 2), head_dim=64, block_size=16)
    (row,) = case.rows
    with make_runner(isa) as runner, make_runner(isa, num_threads=2) as two:

        def of_chunk(first: int, end: int) -> torch.Tensor:
            part = AttentionRow(
                first_token=0,
                num_tokens=end - first,
                context_len=row.context_len - num_tokens + end,
                block_table=row.block_table,
            )
            chosen = two if first % 2 else runner
            return attention(
                chosen,
                case.q_TND[first:end],
                pool=case.pool,
                layer=LAYER,
                rows=[part],
                window=window,
            )

        whole = of_chunk(0, num_tokens)
        for size in (1, 2, 16, 33):
            for first in range(0, num_tokens, size):
                end = min(first + size, num_tokens)
                assert torch.equal(of_chunk(first, end), whole[first:end])
