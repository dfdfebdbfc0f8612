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


def near_ties(
    reference: Any, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
) -> int:
    """0 if the tokens are equal, 1 if the first difference is a near tie of reference's logits.

    Fails otherwise. After a first difference the two go on from different texts.
    """
    if list(expected) == list(got):
        return 0
    first = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    assert first < min(len(expected), len(got)), f"{len(got)} tokens, not {len(expected)}"
    context = torch.tensor([[*prompt, *expected[:first]]])
    with torch.inference_mode():
        logits_V = reference(context).logits[0, -1].float()
    gap = abs(float(logits_V[expected[first]] - logits_V[got[first]]))
    print(f"near tie? prompt of {len(prompt)}, token {first}: gap {gap:.2e}, bound {NEAR_TIE}")
    assert gap < NEAR_TIE, f"token {first}: {got[first]}, not {expected[first]} (gap {gap})"
    return 1
