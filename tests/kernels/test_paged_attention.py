"""Paged attention against the textbook, token by token; the pool is NaN where nothing is."""

import random
from typing import Any

import pytest
import torch

from bench.attention_case import make_case
from kernels.paged_attention import AttentionRow, paged_attention, plan_attention

NUM_BLOCKS, NUM_LAYERS = 200, 2


def textbook(q_ND: torch.Tensor, k_CHD: torch.Tensor, v_CHD: torch.Tensor) -> torch.Tensor:
    """One query per head over all keys given, in float64."""
    group_size = q_ND.shape[0] // k_CHD.shape[1]
    out = []
    for head, q_D in enumerate(q_ND.double()):
        k_CD, v_CD = k_CHD[:, head // group_size].double(), v_CHD[:, head // group_size].double()
        weights_C = (k_CD @ q_D * q_D.shape[0] ** -0.5).softmax(0)
        out.append(weights_C @ v_CD)
    return torch.stack(out).float()


def check(
    rows: list[tuple[int, int]], *, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    """rows are (queries, keys before them); heads are (query heads, kv heads)."""
    generator = torch.Generator().manual_seed(0)
    num_query_heads, num_kv_heads = heads
    pool = torch.full((NUM_BLOCKS, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim), float("nan"))
    free = list(range(NUM_BLOCKS))
    random.Random(0).shuffle(free)
    packed, plan_rows, expected = [], [], []
    layer, first = 1, 0
    for num_tokens, start in rows:
        context_len = start + num_tokens
        table = [free.pop() for _ in range(-(-context_len // block_size) + 1)]
        k, v = torch.randn(2, context_len, num_kv_heads, head_dim, generator=generator)
        q = torch.randn(num_tokens, num_query_heads, head_dim, generator=generator)
        for position in range(context_len):
            slot = pool[table[position // block_size], layer, :, :, position % block_size]
            slot[0], slot[1] = k[position], v[position]
        for token in range(num_tokens):
            seen = start + token + 1
            expected.append(textbook(q[token], k[:seen], v[:seen]))
        plan_rows.append(
            AttentionRow(
                first_token=first,
                num_tokens=num_tokens,
                context_len=context_len,
                block_table=table,
            )
        )
        packed.append(q)
        first += num_tokens
    plan = plan_attention(plan_rows, pool=pool)
    out = paged_attention(torch.cat(packed), pool=pool, layer=layer, plan=plan)
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_decode_rows_and_chunks_mix(heads: tuple[int, int], block_size: int) -> None:
    rows = [(1, 0), (5, 0), (1, 15), (1, 16), (3, 14), (1, 40), (17, 3)]
    check(rows, heads=heads, head_dim=6, block_size=block_size)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 123])
def test_one_decode_row_of_any_length(context: int) -> None:
    check([(1, context - 1)], heads=(3, 1), head_dim=8, block_size=16)


def test_a_chunk_longer_than_a_tile_after_a_cached_prefix() -> None:
    check([(261, 37)], heads=(3, 1), head_dim=4, block_size=16)


def test_decode_rows_past_one_group_of_padding() -> None:
    """Two kv heads of 64 floats are 1 KiB a token, so these do not fit one 1 MiB group."""
    rows = [(1, length) for length in (700, 2, 650, 3, 610, 33)]
    check(rows, heads=(4, 2), head_dim=64, block_size=32)


def test_no_rows_give_no_output() -> None:
    pool = torch.zeros(1, 1, 2, 1, 4, 8)
    plan = plan_attention([], pool=pool)
    assert paged_attention(torch.zeros(0, 2, 8), pool=pool, layer=0, plan=plan).shape == (0, 2, 8)


SINKS_N = torch.tensor([-30.0, 0.0, 0.5, 2.0, 9.0, 60.0])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 3},
    {"window": 16},
    {"window": 37},
    {"window": 1000},
    {"soft_cap": 0.8},
    {"sinks_N": SINKS_N},
    {"window": 5, "soft_cap": 3.0, "sinks_N": SINKS_N},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("is_packed", [False, True])
def test_windows_caps_and_sinks_are_those_of_the_formula(
    options: dict[str, Any], block_size: int, is_packed: bool
) -> None:
    rows = [(1, 0), (5, 0), (1, 15), (0, 0), (1, 16), (3, 14), (1, 122), (261, 37)]
    case = make_case(rows, heads=(6, 2), head_dim=8, block_size=block_size)
    plan = case.packed() if is_packed else plan_attention(case.rows, pool=case.pool)
    out = paged_attention(case.q_TND, pool=case.pool, layer=case.layer, plan=plan, **options)
    torch.testing.assert_close(out.double(), case.expected(**options), rtol=1e-5, atol=1e-5)


def test_the_formula_is_the_textbook() -> None:
    """make_case's own answer, for the textbook's case, token by token."""
    case = make_case([(3, 4)], heads=(4, 2), head_dim=6, block_size=4)
    k_pool, v_pool = case.pool[:, case.layer].unbind(1)
    table = case.rows[0].block_table
    k_CHD, v_CHD = (
        torch.stack([kv[table[position // 4], :, position % 4] for position in range(7)])
        for kv in (k_pool, v_pool)
    )
    expected = [textbook(case.q_TND[t], k_CHD[: 5 + t], v_CHD[: 5 + t]) for t in range(3)]
    torch.testing.assert_close(case.expected().float(), torch.stack(expected))
