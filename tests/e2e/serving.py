"""What the end-to-end tests share: a client call that collects everything, and comparisons."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coordinator.client import AsyncClient
from coordinator.events import Delta, Finished, Node
from engine.emulated_executor import next_token, pack_tokens
from engine.executor import Draw
from engine.sequence import SamplingParams

# Two logits (float32) closer than this may swap between two orders of summation. Rounding moves a
# logit of these models (of size 10 to 30) by some 1e-5; a wrong KV entry moves it by far more.
NEAR_TIE = 1e-3
EMULATED_VOCAB_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One generation as a client saw it."""

    token_ids: list[int]
    text: str
    finished: Finished


def predicted(
    prompt: list[int], num_tokens: int, *, seed: int | None = None, choice: int = 0
) -> list[int]:
    """What an emulated model's hash rule gives; seed for a sampled request."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        draw = Draw(
            sampling=SamplingParams(temperature=0.0 if seed is None else 1.0),
            seed=seed or 0,
            choice=choice,
            position=len(tokens),
        )
        tokens.append(next_token(pack_tokens(tokens), draw=draw, vocab_size=EMULATED_VOCAB_SIZE))
    return tokens[len(prompt) :]


async def collect(client: AsyncClient, prompt: Any, **options: Any) -> Result:
    """Runs one generation to its end; tokens must come in order and once."""
    token_ids: list[int] = []
    text = ""
    position: int | None = None
    async for event in client.generate(prompt, **options):
        if isinstance(event, Finished):
            return Result(token_ids=token_ids, text=text, finished=event)
        assert isinstance(event, Delta)
        assert position in (None, event.position)
        position = event.position + len(event.token_ids)
        token_ids += event.token_ids
        text += event.text
    raise AssertionError("the stream ended without its last message")


async def wait_all_available(client: AsyncClient) -> None:
    """Returns once every block of every node is available; the test's timeout is the deadline."""
    await wait_until(client, lambda nodes: all(n.available_blocks == n.num_blocks for n in nodes))


async def wait_until(client: AsyncClient, holds: Callable[[list[Node]], bool]) -> None:
    """Returns once holds is true of the cluster's nodes; the test's timeout is the deadline.

    There is no call that waits for a change, and asking without a pause takes a core from them.
    """
    while not holds(await client.list_nodes()):
        await asyncio.sleep(0.01)


def near_ties(reference: Any, prompt: Sequence[int], got: Sequence[int]) -> int:
    """How many of the greedy tokens got are near ties of reference's logits, not their maximum.

    One forward pass over prompt and got, which gives the logits that each token was chosen from:
    tokens that are the maximum at every position are, by induction, those reference generates.
    Fails where a token is neither the maximum nor nearly so.
    """
    num_tokens = len(got)
    text = torch.tensor([[*prompt, *got[:-1]]])
    with torch.inference_mode():
        logits_TV = reference(text, logits_to_keep=num_tokens, use_cache=False).logits[0].float()
    best_T = logits_TV.amax(-1)
    chosen_T = logits_TV[torch.arange(num_tokens), torch.tensor(got)]
    gaps = (best_T - chosen_T).tolist()
    ties = [index for index, gap in enumerate(gaps) if gap > 0]
    for index in ties:
        gap = gaps[index]
        print(f"near tie? prompt of {len(prompt)}, token {index}: gap {gap:.2e}")
        assert gap < NEAR_TIE, f"token {index} is {got[index]}, {gap} below the best"
    return len(ties)
