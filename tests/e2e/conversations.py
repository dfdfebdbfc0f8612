"""Made-up conversations whose prompts overlap in every way, and how two runs of them compare.

    play(client, ...)       the first run: each turn goes on from answers of the turns before it
    replay(client, turns)   the same prompts somewhere else, turn after turn

Prompts begin with one of a few system prompts; a turn goes on, repeats the last one exactly, goes
back to an earlier one (fork), or changes a token in the middle. Lengths are at block edges.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coordinator.client import AsyncClient
from engine.executor import Draw, History
from engine.sampler import sampling_margin
from engine.sequence import SamplingParams
from tests.e2e.serving import NEAR_TIE, Result, collect

BLOCK_SIZE = 16
MAX_PROMPT = 230
# Every token id of the tiny models that is no special one.
NUM_IDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    prompt: tuple[int, ...]
    options: dict[str, Any]
    tokens: tuple[int, ...]


def system_prompts(rng: random.Random) -> list[tuple[int, ...]]:
    return [_some_tokens(rng, length) for length in (1, 15, 16, 17, 48, 123)]


async def play(
    client: AsyncClient, rng: random.Random, systems: Sequence[tuple[int, ...]], *, num_turns: int
) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(num_turns):
        prompt, options = _next_prompt(rng, turns, systems), _options(rng)
        result = await collect(client, list(prompt), **options)
        turns.append(Turn(prompt=prompt, options=options, tokens=tuple(result.token_ids)))
    return turns


async def replay(
    client: AsyncClient, conversations: Sequence[Sequence[Turn]], *, at_once: int
) -> list[list[Result]]:
    limit = asyncio.Semaphore(at_once)

    async def one(turns: Sequence[Turn]) -> list[Result]:
        async with limit:
            return [await collect(client, list(each.prompt), **each.options) for each in turns]

    return await asyncio.gather(*map(one, conversations))


def near_ties(
    reference: Any, conversations: Sequence[Sequence[Turn]], got: Sequence[Sequence[Result]]
) -> int:
    """How many turns differ, each first at a near tie of what was drawn from. Fails where one
    differs otherwise."""
    num_ties = 0
    for turns, results in zip(conversations, got, strict=True):
        for turn, result in zip(turns, results, strict=True):
            if tuple(result.token_ids) != turn.tokens:
                margin = _margin_of_first_difference(reference, turn, result.token_ids)
                assert margin < NEAR_TIE, f"{turn}: {result.token_ids}, margin {margin}"
                num_ties += 1
    return num_ties


def _next_prompt(
    rng: random.Random, turns: Sequence[Turn], systems: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    if not turns:
        return _with_message(rng, rng.choice(systems))
    kind = rng.choice(("go on", "go on", "go on", "repeat", "fork", "edit"))
    if kind == "repeat":
        return turns[-1].prompt
    if kind == "edit":
        prompt = list(turns[-1].prompt)
        prompt[rng.randrange(len(prompt))] = rng.randrange(NUM_IDS)
        return tuple(prompt)
    from_turn = rng.choice(turns) if kind == "fork" else turns[-1]
    history = from_turn.prompt + from_turn.tokens
    if kind == "fork":
        history = history[: rng.randrange(1, len(history))]
    return _with_message(rng, history)


def _with_message(rng: random.Random, history: tuple[int, ...]) -> tuple[int, ...]:
    """history and a message, to a length at or next to the edge of a block; the end of a
    conversation that has become too long is cut off."""
    history = history[: MAX_PROMPT - 2 * BLOCK_SIZE]
    length = len(history) + rng.randrange(2, BLOCK_SIZE)
    edge = -(-length // BLOCK_SIZE) * BLOCK_SIZE
    length = rng.choice((length, edge - 1, edge, edge + 1))
    return history + _some_tokens(rng, max(1, length - len(history)))


def _options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 7, 16, 33)), "ignore_eos": True}
    if rng.random() < 0.5:
        options |= {"temperature": 0.9, "seed": rng.randrange(2**60)}
    if rng.random() < 0.2:
        options |= {"repetition_penalty": 1.3}
    return options


def _some_tokens(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(NUM_IDS) for _ in range(num_tokens))


def _margin_of_first_difference(reference: Any, turn: Turn, got: Sequence[int]) -> float:
    assert len(got) == len(turn.tokens)
    first = next(i for i, pair in enumerate(zip(turn.tokens, got, strict=True)) if len({*pair}) > 1)
    context = [*turn.prompt, *turn.tokens[:first]]
    with torch.inference_mode():
        logits_V = reference(torch.tensor([context])).logits[0, -1].float()
    draw = Draw(
        sampling=SamplingParams(
            temperature=turn.options.get("temperature", 0.0),
            repetition_penalty=turn.options.get("repetition_penalty", 1.0),
        ),
        seed=turn.options.get("seed", 0),
        choice=0,
        position=len(context),
        history=History(token_ids=context, num_prompt_tokens=len(turn.prompt)),
    )
    return sampling_margin(logits_V, draw)
