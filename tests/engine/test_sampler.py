"""Sampling against transformers' warpers, and its own promises: pure, exact at the edges."""

import math
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import sampler
from engine.executor import Draw
from engine.sampler import draw_tokens, filter_logits, sampling_margin, uniform
from engine.sequence import SamplingParams

INF = float("inf")


def make_draw(*, position: int = 0, banned: frozenset[int] = frozenset(), **params: Any) -> Draw:
    return Draw(
        sampling=SamplingParams(**params),
        seed=11,
        choice=0,
        position=position,
        banned_token_ids=banned,
    )


def random_logits(num_tokens: int, *, seed: int) -> torch.Tensor:
    return 3 * torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed))


def warped(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """As transformers' generate does, in its order."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits_V[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores[0]


@pytest.mark.parametrize("num_tokens", [1, 7, 259])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=1),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_k=1000),
        SamplingParams(temperature=0.9, top_p=0.01),
        SamplingParams(temperature=0.9, top_p=0.83),
        SamplingParams(temperature=2.0, min_p=0.07),
        SamplingParams(temperature=1.5, min_p=1.0),
        SamplingParams(temperature=1.1, top_k=23, top_p=0.9, min_p=0.02),
    ],
)
def test_filters_keep_what_transformers_keeps(params: SamplingParams, num_tokens: int) -> None:
    for seed in range(20):
        logits_V = random_logits(num_tokens, seed=seed)
        ours, theirs = filter_logits(logits_V, params), warped(logits_V, params)
        assert torch.equal(ours.isinf(), theirs.isinf())
        torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), rtol=1e-5, atol=1e-7)


def test_equal_logits_at_the_top_k_edge_are_all_kept() -> None:
    kept = filter_logits(torch.tensor([1.0, 2.0, 1.0, 0.0]), SamplingParams(temperature=1, top_k=2))
    assert kept.isfinite().tolist() == [True, True, True, False]


def test_a_tiny_temperature_is_greedy_and_not_a_nan() -> None:
    logits_BV = torch.tensor([[50.0, 60.0, -1e4]])
    assert draw_tokens(logits_BV, [make_draw(temperature=1e-40)]) == [1]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits_BV = torch.tensor([[0.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    assert draw_tokens(logits_BV, [make_draw(), make_draw()]) == [1, 0]


def test_greedy_and_sampled_rows_mix_and_do_not_disturb_each_other() -> None:
    logits_BV = torch.stack([random_logits(50, seed=seed) for seed in range(6)])
    draws = [make_draw(position=row, temperature=row % 2) for row in range(6)]
    alone = [draw_tokens(logits_BV[row : row + 1], [draws[row]])[0] for row in range(6)]
    assert draw_tokens(logits_BV, draws) == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_drawn(temperature: float) -> None:
    logits_BV = torch.tensor([[0.0, 30.0, 1.0, 29.0]])
    banned = frozenset({1, 3})
    for position in range(50):
        draw = make_draw(position=position, temperature=temperature, banned=banned)
        assert draw_tokens(logits_BV, [draw])[0] in (0, 2)
    assert logits_BV[0, 1] == 30.0


def test_nothing_left_to_draw_and_nan_are_errors() -> None:
    with pytest.raises(ValueError, match="logits of row 0: no finite maximum"):
        draw_tokens(torch.zeros(1, 2), [make_draw(banned=frozenset({0, 1}))])
    logits_BV = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]])
    with pytest.raises(ValueError, match="logits of row 1: no finite maximum"):
        draw_tokens(logits_BV, [make_draw(), make_draw()])


def test_sampled_tokens_are_the_inverse_cdf_of_u() -> None:
    """Shares 1/8, 1/2, 1/8, 1/4 in id order, so the edges are at 1/8, 5/8 and 6/8."""
    logits_BV = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    for position in range(300):
        u = uniform(seed=11, choice=0, position=position)
        expected = sum(u >= edge for edge in (0.125, 0.625, 0.75))
        draw = make_draw(position=position, temperature=1.0)
        assert draw_tokens(logits_BV, [draw]) == [expected]


def test_u_depends_on_every_part_and_is_spread_evenly() -> None:
    base = uniform(seed=1, choice=2, position=3)
    assert base == uniform(seed=1, choice=2, position=3)
    others = [
        uniform(seed=2, choice=2, position=3),
        uniform(seed=1, choice=3, position=3),
        uniform(seed=1, choice=2, position=4),
        uniform(seed=2**64 - 1, choice=2, position=3),
        uniform(seed=12, choice=3, position=3),
    ]
    assert len({base, *others}) == 6
    drawn = [uniform(seed=5, choice=0, position=position) for position in range(4000)]
    assert all(0 <= u < 1 for u in drawn)
    for tenth in range(10):
        count = sum(tenth / 10 <= u < (tenth + 1) / 10 for u in drawn)
        # Five standard deviations of a binomial.
        assert abs(count - 400) < 5 * math.sqrt(4000 * 0.1 * 0.9)


def test_an_edge_belongs_to_the_token_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda **_: 0.5)
    assert draw_tokens(torch.zeros(1, 2), [make_draw(temperature=1.0)]) == [1]


def test_a_target_rounded_up_to_the_end_is_the_last_kept_token() -> None:
    cdf_K = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert sampler._index(cdf_K, 0.75) == 1


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_u_never_reach_a_filtered_token(
    monkeypatch: pytest.MonkeyPatch, u: float
) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda **_: u)
    for seed in range(30):
        logits_V = random_logits(1001, seed=seed)
        params = SamplingParams(temperature=1.0, top_k=17)
        kept = filter_logits(logits_V, params).isfinite().nonzero().flatten().tolist()
        draw = make_draw(temperature=1.0, top_k=17)
        assert draw_tokens(logits_V[None], [draw]) == [kept[0] if u == 0 else kept[-1]]


def test_greedy_margin_is_the_gap_of_the_two_best() -> None:
    logits_V = torch.tensor([1.0, 4.0, 3.5, 9.0])
    assert sampling_margin(logits_V, make_draw()) == 5.0
    assert sampling_margin(logits_V, make_draw(banned=frozenset({3}))) == 0.5


@pytest.mark.parametrize(("u", "margin"), [(0.05, 0.2), (0.26, 0.01), (0.5, 0.25), (0.9, 0.15)])
def test_sampled_margin_is_the_distance_to_the_nearest_inner_edge(
    monkeypatch: pytest.MonkeyPatch, u: float, margin: float
) -> None:
    """Shares 1/4, 1/2, 1/4: inner edges at 0.25 and 0.75; 0 and 1 are not near any other token."""
    monkeypatch.setattr(sampler, "uniform", lambda **_: u)
    logits_V = torch.tensor([0.25, 0.5, 0.25]).log()
    assert sampling_margin(logits_V, make_draw(temperature=1.0)) == pytest.approx(margin, abs=1e-6)


def test_a_draw_without_rivals_has_an_infinite_margin() -> None:
    assert sampling_margin(torch.zeros(1), make_draw()) == INF
    only = make_draw(temperature=1.0, top_k=1)
    assert sampling_margin(torch.tensor([0.0, 5.0, 1.0]), only) == INF
