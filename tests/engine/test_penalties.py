"""Bias and penalties against transformers' processors, one row at a time and in a batch."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from engine.device_sampler import DeviceSampler
from engine.executor import Draw, History
from engine.sampler import draw_tokens, penalize, sampling_margin
from engine.sequence import SamplingParams

CPU = torch.device("cpu")
VOCAB = 123


def make_draw(
    token_ids: list[int],
    num_prompt_tokens: int,
    *,
    banned: frozenset[int] = frozenset(),
    **params: Any,
) -> Draw:
    sampling = SamplingParams(**params)
    history = History(token_ids=token_ids, num_prompt_tokens=num_prompt_tokens)
    return Draw(
        sampling=sampling,
        seed=7,
        choice=0,
        position=len(token_ids),
        banned_token_ids=banned,
        history=history if sampling.has_penalties else None,
    )


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 100.0])
@pytest.mark.parametrize("num_tokens", [1, 2, 300])
def test_bias_then_repetition_penalty_is_what_transformers_makes_of_logits(
    penalty: float, num_tokens: int
) -> None:
    rng = random.Random(num_tokens)
    token_ids = rng.choices(range(VOCAB), k=num_tokens)
    bias = {token: rng.uniform(-100, 100) for token in rng.sample(range(VOCAB), 20)}
    logits_V = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    draw = make_draw(
        token_ids, 1, repetition_penalty=penalty, logit_bias=tuple(sorted(bias.items()))
    )
    ids = torch.tensor([token_ids])
    biased = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    repeated = RepetitionPenaltyLogitsProcessor(penalty)
    theirs = repeated(ids, biased(ids, logits_V[None]))[0]
    assert torch.equal(penalize(logits_V, draw), theirs)


def test_presence_counts_once_and_frequency_every_time_and_neither_the_prompt() -> None:
    """Prompt 0 0 1, output 1 2 2 2: 1 is out once, 2 three times, 0 never."""
    draw = make_draw([0, 0, 1, 1, 2, 2, 2], 3, presence_penalty=0.5, frequency_penalty=0.25)
    logits_V = torch.tensor([4.0, 4.0, 4.0, 4.0])
    assert penalize(logits_V, draw).tolist() == [4.0, 4 - 0.5 - 0.25, 4 - 0.5 - 0.75, 4.0]
    assert logits_V.tolist() == [4.0] * 4


def test_the_steps_come_in_order() -> None:
    """(1 + 3) / 2 - 0.5 - 0.25 for a token of the output that has a bias of 3."""
    draw = make_draw(
        [1, 0],
        1,
        logit_bias=((0, 3.0),),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    assert penalize(torch.tensor([1.0, -1.0, 5.0]), draw).tolist() == [1.25, -2.0, 5.0]


@pytest.mark.parametrize("draw_all", [draw_tokens, DeviceSampler(CPU).draw])
def test_a_tiny_repetition_penalty_still_draws(draw_all: Any) -> None:
    draw = make_draw([1], 1, repetition_penalty=1e-45)
    assert draw_all(torch.tensor([[50.0, 2.0, -3.0]]), [draw]) == [1]
    sampled = replace(draw, sampling=replace(draw.sampling, temperature=1.0))
    assert draw_all(torch.tensor([[50.0, 2.0, -3.0]]), [sampled]) == [1]


@pytest.mark.parametrize("draw_all", [draw_tokens, DeviceSampler(CPU).draw])
def test_a_bias_decides_and_a_ban_outweighs_it(draw_all: Any) -> None:
    draw = make_draw([], 0, logit_bias=((2, 100.0), (1, 50.0)))
    assert draw_all(torch.tensor([[5.0, 0.0, 0.0]]), [draw]) == [2]
    banned = replace(draw, banned_token_ids=frozenset({2}))
    assert draw_all(torch.tensor([[5.0, 0.0, 0.0]]), [banned]) == [1]


def test_a_margin_is_that_of_the_penalized_logits() -> None:
    draw = make_draw([0], 1, repetition_penalty=2.0)
    assert sampling_margin(torch.tensor([4.0, 3.0, 0.5]), draw) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_on_the_device_draws_what_the_reference_draws(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    sampler = DeviceSampler(CPU)
    logits_BV = 3 * torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(0))
    logits_BV = logits_BV.to(dtype)
    draws = [
        make_draw(
            rng.choices(range(VOCAB), k=rng.choice((1, 2, 60, 400))),
            rng.choice((0, 1, 30)),
            banned=frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 40)))),
            temperature=rng.choice((0.0, 0.0, 0.9)),
            top_k=rng.choice((0, 20)),
            repetition_penalty=rng.choice((1.0, 0.7, 1.3)),
            presence_penalty=rng.choice((0.0, -2.0, 0.7)),
            frequency_penalty=rng.choice((0.0, -0.3, 1.1)),
            logit_bias=tuple((token, rng.uniform(-5, 5)) for token in range(rng.choice((0, 9)))),
        )
        for _ in range(len(logits_BV))
    ]
    assert any(draw.is_adjusted for draw in draws) and not all(draw.is_adjusted for draw in draws)
    alone = [draw_tokens(logits_BV[row][None], [draw])[0] for row, draw in enumerate(draws)]
    assert draw_tokens(logits_BV, draws) == alone
    assert sampler.draw(logits_BV.clone(), draws) == alone
    plain = [replace(draw, sampling=SamplingParams(), history=None) for draw in draws]
    assert sampler.draw(logits_BV.clone(), plain) == draw_tokens(logits_BV, plain) != alone
