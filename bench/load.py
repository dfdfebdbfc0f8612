"""Closed-loop load: so many requests at a time, of fixed length, against any target.

    Target.generate(prompt, num_tokens) -> arrival time of every token
    run(target, ...) -> a Sample per request

Prompts are random token ids, other ones in every request, so that no prefix cache answers.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Ordinary tokens of SmolLM2.
VOCAB = range(1000, 49_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """When each token came, in monotonic seconds; the handoff gap as the server tells it."""

    stamps: list[float]
    handoff_gap_s: float | None = None


class Target(Protocol):
    """A server under load: ours (bench/targets.py), or one that speaks OpenAI's HTTP API."""

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> Tokens: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request, in seconds."""

    ttft_s: float
    tpot_s: float
    handoff_gap_s: float | None
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Medians of a run in milliseconds, and its rate."""

    num_requests: int
    ttft_ms: float
    tpot_ms: float
    handoff_gap_ms: float | None
    tokens_per_s: float


async def run(
    target: Target,
    *,
    num_input: int,
    num_output: int,
    concurrency: int,
    num_requests: int,
    rng: random.Random,
) -> Summary:
    """num_requests requests, concurrency at a time."""
    limit = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> Sample:
        async with limit:
            return await _measure(target, prompt, num_output)

    prompts = [rng.choices(VOCAB, k=num_input) for _ in range(num_requests)]
    started = time.monotonic()
    samples = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return summarise(samples, time.monotonic() - started)


def summarise(samples: Sequence[Sample], wall_s: float) -> Summary:
    gaps = [sample.handoff_gap_s for sample in samples if sample.handoff_gap_s is not None]
    return Summary(
        num_requests=len(samples),
        ttft_ms=1e3 * statistics.median(sample.ttft_s for sample in samples),
        tpot_ms=1e3 * statistics.median(sample.tpot_s for sample in samples),
        handoff_gap_ms=1e3 * statistics.median(gaps) if gaps else None,
        tokens_per_s=sum(sample.num_tokens for sample in samples) / wall_s,
    )


def report(name: str, summary: Summary) -> None:
    gap = "" if summary.handoff_gap_ms is None else f"{summary.handoff_gap_ms:6.1f} ms"
    print(
        f"{name:12} n={summary.num_requests:3}"
        f" | TTFT p50 {summary.ttft_ms:7.1f} ms"
        f" | TPOT p50 {summary.tpot_ms:6.1f} ms"
        f" | token 1 to 2 p50 {gap:9}"
        f" | {summary.tokens_per_s:6.1f} output tok/s",
        flush=True,
    )


async def _measure(target: Target, prompt: list[int], num_output: int) -> Sample:
    started = time.monotonic()
    tokens = await target.generate(prompt, num_output)
    stamps = tokens.stamps
    if len(stamps) != num_output:
        raise RuntimeError(f"{len(stamps)} tokens came, {num_output} were asked for")
    return Sample(
        ttft_s=stamps[0] - started,
        tpot_s=(stamps[-1] - stamps[0]) / max(1, num_output - 1),
        handoff_gap_s=tokens.handoff_gap_s,
        num_tokens=num_output,
    )
