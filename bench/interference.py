"""python -m bench.interference: what long prompts do to short ones and to running streams.

    phase "calm":       steady streams, and short prompts at a rate
    phase "disturbed":  the same, and a long prompt every few seconds

Prints TTFT of the short prompts and ITL (every gap) of the steady streams in both phases, and the
ratio of their p99. Open loop: arrivals do not wait for answers. --prefill 0 is colocated serving.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.load import VOCAB
from bench.targets import pin
from coordinator.client import AsyncClient
from coordinator.events import Delta, Finished
from coordinator.supervisor import Cluster


@dataclass
class Phase:
    """What one phase has measured, in seconds."""

    short_ttft: list[float] = field(default_factory=list)
    long_ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    served_as: Counter[str] = field(default_factory=Counter)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.interference")
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--dtype", default="bfloat16")
    add("--prefill", type=int, default=1)
    add("--threads", type=int, default=1)
    add("--streams", type=int, default=2, help="steady streams")
    add("--short", type=int, default=64, help="tokens of a short prompt")
    add("--short-rate", type=float, default=2.0, help="short prompts per second")
    add("--long", type=int, default=1500, help="tokens of a long prompt")
    add("--long-every", type=float, default=2.0, help="seconds between long prompts")
    add("--seconds", type=float, default=30.0, help="of each phase")
    add("--step-budget-ms", type=float, default=None)
    add("--seed", type=int, default=0)
    asyncio.run(measure(parser.parse_args()))


async def measure(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    async with (
        Cluster(
            model=args.model,
            num_prefill=args.prefill,
            num_decode=1,
            node_options={
                "dtype": args.dtype,
                "threads": args.threads,
                "step_budget_ms": args.step_budget_ms,
            },
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        pin(cluster, threads=args.threads)
        await run_phase(client, args, rng, seconds=5.0, with_long=True)
        calm = await run_phase(client, args, rng, seconds=args.seconds, with_long=False)
        disturbed = await run_phase(client, args, rng, seconds=args.seconds, with_long=True)
    print("| ms | short TTFT p50 / p99 | long TTFT p50 | ITL p50 / p99 / max | served as |")
    print("|--|--|--|--|--|")
    for name, phase in (("calm", calm), ("disturbed", disturbed)):
        long_p50 = f"{_ms(phase.long_ttft, 50):.0f}" if phase.long_ttft else ""
        print(
            f"| {name} | {_ms(phase.short_ttft, 50):.0f} / {_ms(phase.short_ttft, 99):.0f}"
            f" | {long_p50} | {_ms(phase.itl, 50):.1f} / {_ms(phase.itl, 99):.1f} / "
            f"{1e3 * max(phase.itl):.1f} | {dict(phase.served_as)} |"
        )
    print(f"ITL p99 disturbed / calm: {_ms(disturbed.itl, 99) / _ms(calm.itl, 99):.2f}")


async def run_phase(
    client: AsyncClient,
    args: argparse.Namespace,
    rng: random.Random,
    *,
    seconds: float,
    with_long: bool,
) -> Phase:
    phase = Phase()
    ends = time.monotonic() + seconds

    async def ask(num_prompt: int, num_tokens: int, ttft: list[float]) -> None:
        started = time.monotonic()
        prompt = rng.choices(VOCAB, k=num_prompt)
        first = True
        async for event in client.generate(prompt, max_tokens=num_tokens, ignore_eos=True):
            if isinstance(event, Finished):
                phase.served_as[event.served_as] += 1
            elif isinstance(event, Delta) and first:
                ttft.append(time.monotonic() - started)
                first = False

    async def steady() -> None:
        while time.monotonic() < ends:
            before = None
            prompt = rng.choices(VOCAB, k=64)
            async for event in client.generate(prompt, max_tokens=400, ignore_eos=True):
                if not isinstance(event, Delta):
                    continue
                now = time.monotonic()
                if before is not None:
                    # Tokens that come together have no gap between them.
                    phase.itl += [now - before] + [0.0] * (len(event.token_ids) - 1)
                before = now
                if now > ends:
                    break

    async def arrive(every_s: float, work, *, poisson: bool) -> None:  # type: ignore[no-untyped-def]
        async with asyncio.TaskGroup() as requests:
            at = time.monotonic()
            while (at := at + (rng.expovariate(1 / every_s) if poisson else every_s)) < ends:
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                requests.create_task(work())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(args.streams):
            tasks.create_task(steady())
        tasks.create_task(
            arrive(1 / args.short_rate, lambda: ask(args.short, 8, phase.short_ttft), poisson=True)
        )
        if with_long:
            tasks.create_task(
                arrive(args.long_every, lambda: ask(args.long, 8, phase.long_ttft), poisson=False)
            )
    return phase


def _ms(seconds: Sequence[float], percentile: int) -> float:
    return 1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[percentile - 1]


if __name__ == "__main__":
    main()
