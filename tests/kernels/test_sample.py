"""Batched draws against engine/sampler.py, which draws one row at a time."""

import random

import torch

from engine.executor import Draw
from engine.sampler import draw_tokens, uniform
from engine.sequence import SamplingParams
from kernels.sample import greedy, sample

VOCAB = 123


def test_greedy_takes_the_lowest_of_equals_and_reports_rows_without_a_maximum() -> None:
    logits = torch.zeros(5, VOCAB)
    logits[1, 7] = logits[1, 100] = 2.0
    logits[2, 5] = float("nan")
    logits[3] = float("-inf")
    logits[4, 122] = float("inf")
    assert greedy(logits).tolist() == [0, 7, -1, -1, -1]


def test_every_row_draws_what_it_draws_alone() -> None:
    rng = random.Random(0)
    logits = 3 * torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(0))
    # Ties at the edge of a filter, but not of top_p: there the reference's sort decides.
    logits[::3] = logits[::3].round()
    logits[::7, 5:50] = float("-inf")
    draws = [
        Draw(
            sampling=SamplingParams(
                temperature=rng.choice((1e-3, 0.3, 1.0, 2.5)),
                top_k=rng.choice((0, 1, 5, 122, 123, 1000)),
                top_p=rng.choice((1.0, 0.9, 0.3, 1e-6)) if row % 3 else 1.0,
                min_p=rng.choice((0.0, 0.05, 0.7, 1.0)),
            ),
            seed=row,
            choice=0,
            position=row,
        )
        for row in range(len(logits))
    ]
    params = [draw.sampling for draw in draws]
    tokens = sample(
        logits,
        temperature_B=torch.tensor([param.temperature for param in params]),
        top_k_B=torch.tensor([param.top_k for param in params], dtype=torch.int32),
        tail_B=torch.tensor([1 - param.top_p for param in params]),
        min_p_B=torch.tensor([param.min_p for param in params]),
        u_B=torch.tensor(
            [uniform(seed=draw.seed, choice=0, position=draw.position) for draw in draws],
            dtype=torch.float64,
        ),
    )
    assert tokens.tolist() == draw_tokens(logits, draws)


def test_a_row_without_a_maximum_draws_nothing() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0] = float("-inf")
    logits[1, 3] = float("nan")
    ones = torch.ones(3)
    tokens = sample(
        logits,
        temperature_B=ones,
        top_k_B=torch.zeros(3, dtype=torch.int32),
        tail_B=0 * ones,
        min_p_B=0 * ones,
        u_B=(0 * ones).double(),
    )
    assert tokens.tolist() == [-1, -1, 0]
