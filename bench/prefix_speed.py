"""python -m bench.prefix_speed: what a cached prefix saves, on a local cluster.

    repeats   a long prompt, cold and again            TTFT of both, in turns
    chat      five turns, each with all before it      prompt tokens that were computed, by path
    tenants   a prompt that another tenant has sent    no hit, and the TTFT of a cold one

Every prompt is made up and sent for the first time, but for its repeats. --prefill 0 is colocated.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.prompts import VOCAB
from bench.targets import pin
from coordinator.client import AsyncClient
from coordinator.events import Delta, Finished
from coordinator.supervisor import Cluster

# From a request's end to the coordinator's having heard what its nodes keep.
_HEARD_S = 0.2
_NUM_TURNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, and how it came about."""

    token_ids: tuple[int, ...]
    ttft_s: float
    finished: Finished


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_speed")
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--prefill", type=int, default=1, help="prefill nodes; 0: colocated")
    add("--threads", type=int, default=1, help="of each node")
    add("--input", type=int, default=1500, help="tokens of a repeated prompt")
    add("--rounds", type=int, default=15)
    add("--seed", type=int, default=0)
    asyncio.run(measure(parser.parse_args()))


async def measure(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    async with (
        Cluster(
            model=args.model,
            num_prefill=args.prefill,
            num_decode=1,
            node_options={"threads": args.threads},
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        print(pin(cluster, threads=args.threads))
        for _ in range(3):  # once through, not counted
            await ask(client, made_up(rng, args.input))
        await repeats(client, rng, num_input=args.input, rounds=args.rounds)
        await chat(client, rng)
        await tenants(client, rng, num_input=args.input, rounds=args.rounds)


async def repeats(client: AsyncClient, rng: random.Random, *, num_input: int, rounds: int) -> None:
    cold, warm = [], []
    for _ in range(rounds):
        prompt = made_up(rng, num_input)
        cold.append(await ask(client, prompt))
        warm.append(await ask(client, prompt))
    ratio = _p50_ms(warm) / _p50_ms(cold)
    print(
        f"repeats of {num_input} tokens: TTFT p50 cold {_p50_ms(cold):.1f} ms, "
        f"again {_p50_ms(warm):.1f} ms: {ratio:.1%}; {_paths(warm)}"
    )


async def chat(client: AsyncClient, rng: random.Random) -> None:
    """Turns of 40 tokens and answers of 60, behind a system prompt of 200."""
    history = made_up(rng, 200)
    for turn in range(1, _NUM_TURNS + 1):
        message = made_up(rng, 40)
        answer = await ask(client, [*history, *message], num_tokens=60)
        num_computed = answer.finished.prompt_tokens - answer.finished.cached_tokens
        print(
            f"chat turn {turn}: {answer.finished.prompt_tokens} prompt tokens, {num_computed} "
            f"computed; TTFT {1e3 * answer.ttft_s:.1f} ms; {_paths([answer])}"
        )
        history += [*message, *answer.token_ids]


async def tenants(client: AsyncClient, rng: random.Random, *, num_input: int, rounds: int) -> None:
    fresh, other = [], []
    for _ in range(rounds):
        prompt = made_up(rng, num_input)
        await ask(client, prompt, tenant="a")
        other.append(await ask(client, prompt, tenant="b"))
        fresh.append(await ask(client, made_up(rng, num_input), tenant="b"))
    num_cached = sum(answer.finished.cached_tokens for answer in other)
    print(
        f"another tenant's prompt: TTFT p50 {_p50_ms(other):.1f} ms ({_spread(other)}), "
        f"a new one {_p50_ms(fresh):.1f} ms ({_spread(fresh)}); {num_cached} tokens cached"
    )


async def ask(
    client: AsyncClient, prompt: Sequence[int], *, num_tokens: int = 4, tenant: str = ""
) -> Answer:
    started = time.monotonic()
    token_ids: list[int] = []
    ttft_s = 0.0
    async for event in client.generate(
        prompt, max_tokens=num_tokens, ignore_eos=True, tenant=tenant
    ):
        if isinstance(event, Delta):
            ttft_s = ttft_s or time.monotonic() - started
            token_ids += event.token_ids
        elif isinstance(event, Finished):
            await asyncio.sleep(_HEARD_S)
            return Answer(token_ids=tuple(token_ids), ttft_s=ttft_s, finished=event)
    raise RuntimeError("the answer has no end")


def made_up(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(VOCAB, k=num_tokens)


def _p50_ms(answers: Sequence[Answer]) -> float:
    return 1e3 * statistics.median(answer.ttft_s for answer in answers)


def _spread(answers: Sequence[Answer]) -> str:
    times = sorted(1e3 * answer.ttft_s for answer in answers)
    return f"{times[0]:.1f} to {times[-1]:.1f}"


def _paths(answers: Sequence[Answer]) -> str:
    ways = [f"{a.finished.served_as} ({a.finished.served_as_reason})" for a in answers]
    return ", ".join(f"{ways.count(way)} {way}" for way in dict.fromkeys(ways))


if __name__ == "__main__":
    main()
