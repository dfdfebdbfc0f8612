"""python -m bench.generator_check: what the load generator adds to the times that it measures.

    stub (bench/stub_service.py, own process and core)   tokens at a pace, and when each was written
    generator (one core)                                 drives it as any other target

    added = when the generator says that a token came - when the stub began to write it

Both read one CLOCK_MONOTONIC. The way through gRPC and the kernel is in it, on both sides, so it is
an upper bound. Streams send evenly spread, and all at one moment as a decode step does.
"""

import argparse
import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from bench.driver import Driven, drive_open
from bench.prompts import Prompt, Prompted
from bench.records import OK
from bench.self_check import Validity, Watch
from bench.stub_service import Written, run_stub
from bench.targets import Chunks, Ending, OurTarget
from bench.workload import Arrival

_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """num_streams streams send tokens_per_s in all."""

    num_streams: int
    tokens_per_s: float
    duration_s: float
    together: bool

    @property
    def gap_s(self) -> float:
        return self.num_streams / self.tokens_per_s

    @property
    def num_tokens(self) -> int:
        """Of each stream."""
        return round(self.duration_s / self.gap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Per token, and the generator's own check of the run."""

    added_ms: Sequence[float]
    tokens_per_s: float
    validity: Validity


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generator_check")
    add = parser.add_argument
    add("--streams", type=int, default=64)
    add("--tokens-per-s", type=float, default=2000.0)
    add("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    stub_core, own_core = pick_cores()
    os.sched_setaffinity(0, {own_core})
    for together in (False, True):
        pace = Pace(
            num_streams=args.streams,
            tokens_per_s=args.tokens_per_s,
            duration_s=args.seconds,
            together=together,
        )
        report("at one moment" if together else "evenly spread", measure(pace, core=stub_core))


def pick_cores() -> tuple[int, int]:
    """The stub's and the generator's; one and the same where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]


def measure(pace: Pace, *, core: int) -> Added:
    """Starts a stub on the core, drives it and stops it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    options = {
        "num_streams": pace.num_streams,
        "gap_s": pace.gap_s,
        "together": pace.together,
    }
    stub = context.Process(target=run_stub, args=(theirs, core, options), daemon=True)
    stub.start()
    theirs.close()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            driven, chunks, validity = runner.run(drive(_receive(ours), pace))
        ours.send("stop")
        written: Written = _receive(ours)
    finally:
        stub.join(10)
        stub.kill()
    missing = [record.error for record in driven.records if record.outcome != OK]
    if missing:
        raise RuntimeError(f"{len(missing)} streams are not whole: {missing[0]}")
    return Added(
        added_ms=added_ms(written, chunks),
        tokens_per_s=pace.num_streams * pace.num_tokens / _span_s(written),
        validity=validity,
    )


async def drive(address: str, pace: Pace) -> tuple[Driven, dict[int, Chunks], Validity]:
    """Every stream's number is its prompt's first token."""
    target = _Keeping(address)
    arrival = Arrival(at_s=0.0, num_input=_PROMPT_TOKENS, num_output=pace.num_tokens)
    requests = [
        Prompted(arrival=arrival, prompt=[number] * _PROMPT_TOKENS)
        for number in range(pace.num_streams)
    ]
    try:
        async with Watch() as watch:
            driven = await drive_open(target, requests, drain_s=pace.duration_s + 30)
    finally:
        await target.close()
    return driven, target.chunks, watch.check(driven.records)


def added_ms(written: Written, chunks: dict[int, Chunks]) -> list[float]:
    """Of each token; those that came in one chunk came at one time."""
    added = []
    for number, times in written.items():
        came = [at_s for at_s, count in chunks[number] for _ in range(count)]
        added += [1e3 * (at_s - began) for at_s, began in zip(came, times, strict=True)]
    return added


def report(name: str, added: Added) -> None:
    p50, p99 = np.percentile(added.added_ms, [50, 99])
    print(
        f"{name:14} {added.tokens_per_s:6.0f} tok/s | added p50 {p50:.2f} ms, p99 {p99:.2f} ms, "
        f"max {max(added.added_ms):.2f} ms | client {added.validity.cpu_share:.2f} of a core, "
        f"{added.validity.cpu_share_max:.2f} in its busiest second",
        flush=True,
    )


class _Keeping(OurTarget):
    """Keeps chunks with their monotonic times, by the prompt's first token."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.chunks: dict[int, Chunks] = {}

    async def ask(self, prompt: Prompt, num_tokens: int, chunks: Chunks) -> Ending:
        assert not isinstance(prompt, str)
        self.chunks[prompt[0]] = chunks
        return await super().ask(prompt, num_tokens, chunks)


def _receive(pipe: Connection, *, timeout_s: float = 60.0) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"the stub says nothing for {timeout_s:g} s")
    return pipe.recv()


def _span_s(written: Written) -> float:
    return max(times[-1] for times in written.values()) - min(t[0] for t in written.values())


if __name__ == "__main__":
    main()
