"""python -m bench.latency: TTFT, TPOT, handoff gap and tok/s of a local cluster, closed loop.

    python -m bench.latency --prefill 1 --decode 1              # disaggregated, one core each
    python -m bench.latency --prefill 0 --decode 1 --threads 2  # colocated, the same two cores
    python -m bench.latency --transformers --threads 2          # transformers' generate, one by one

Prompts are random token ids, other ones in every request. Times are the client's, except the
handoff gap, which is the coordinator's. Each node is pinned to cores of its own; the client and
the coordinator run on all of them, as they would on such a machine.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from coordinator.client import AsyncClient
from coordinator.events import Delta, Finished
from coordinator.supervisor import Cluster
from engine.catalog import resolve_model

VOCAB = range(1000, 49_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request, in seconds."""

    ttft_s: float
    tpot_s: float
    handoff_gap_s: float | None
    num_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.latency")
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--dtype", default="bfloat16")
    add("--prefill", type=int, default=1, help="prefill nodes; 0: colocated")
    add("--decode", type=int, default=1)
    add("--threads", type=int, default=1, help="of each node")
    add("--input", type=int, default=256, help="prompt tokens")
    add("--output", type=int, default=64, help="tokens to generate")
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    add("--requests", type=int, default=32, help="per concurrency")
    add("--seed", type=int, default=0)
    add("--transformers", action="store_true", help="measure transformers' generate instead")
    args = parser.parse_args()
    if args.transformers:
        measure_transformers(args)
    else:
        asyncio.run(measure_cluster(args))


async def measure_cluster(args: argparse.Namespace) -> None:
    options = {"dtype": args.dtype, "threads": args.threads}
    async with (
        Cluster(
            model=args.model,
            num_prefill=args.prefill,
            num_decode=args.decode,
            node_options=options,
            log_dir=Path("/tmp"),
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        pin(cluster, args.threads)
        rng = random.Random(args.seed)
        await run(client, args, rng, concurrency=2, num_requests=4)
        for concurrency in args.concurrency:
            started = time.monotonic()
            num_requests = max(args.requests, concurrency)
            samples = await run(
                client, args, rng, concurrency=concurrency, num_requests=num_requests
            )
            report(f"c={concurrency}", samples, time.monotonic() - started)


def pin(cluster: Cluster, threads: int) -> None:
    """Nodes get cores of their own, in order, as far as there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    nodes = [child for name, child in cluster.processes.items() if name != "coordinator"]
    if threads * len(nodes) > len(cores):
        print(f"{len(nodes)} nodes of {threads} threads on {len(cores)} cores: not pinned")
        return
    for index, child in enumerate(nodes):
        own = set(cores[index * threads : (index + 1) * threads])
        for task in os.listdir(f"/proc/{child.pid}/task"):
            os.sched_setaffinity(int(task), own)


async def run(
    client: AsyncClient,
    args: argparse.Namespace,
    rng: random.Random,
    *,
    concurrency: int,
    num_requests: int,
) -> list[Sample]:
    limit = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> Sample:
        async with limit:
            return await measure(client, prompt, args.output)

    prompts = [rng.choices(VOCAB, k=args.input) for _ in range(num_requests)]
    return await asyncio.gather(*(one(prompt) for prompt in prompts))


async def measure(client: AsyncClient, prompt: list[int], num_tokens: int) -> Sample:
    started = time.monotonic()
    stamps: list[float] = []
    generation = client.generate(prompt, max_tokens=num_tokens, ignore_eos=True)
    async for event in generation:
        if isinstance(event, Delta):
            stamps += [time.monotonic()] * len(event.token_ids)
        elif isinstance(event, Finished):
            finished = event
    assert len(stamps) == num_tokens
    return Sample(
        ttft_s=stamps[0] - started,
        tpot_s=(stamps[-1] - stamps[0]) / max(1, num_tokens - 1),
        handoff_gap_s=finished.timing.handoff_gap_s,
        num_tokens=num_tokens,
    )


def report(name: str, samples: list[Sample], wall_s: float) -> None:
    gaps = [sample.handoff_gap_s for sample in samples if sample.handoff_gap_s is not None]
    print(
        f"{name:6} n={len(samples)}"
        f" | TTFT p50 {1e3 * statistics.median(s.ttft_s for s in samples):7.1f} ms"
        f" | TPOT p50 {1e3 * statistics.median(s.tpot_s for s in samples):6.1f} ms"
        f" | token 1 to 2 p50 {1e3 * statistics.median(gaps) if gaps else 0:6.1f} ms"
        f" | {sum(s.num_tokens for s in samples) / wall_s:6.1f} output tok/s"
    )


def measure_transformers(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    folder = resolve_model(args.model, allow_download=False).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    rng = random.Random(args.seed)
    samples = []
    started = time.monotonic()
    for _ in range(max(3, args.requests // 4)):
        prompt = torch.tensor([rng.choices(VOCAB, k=args.input)])
        times_s = []
        for num_tokens in (1, args.output):
            before = time.monotonic()
            with torch.inference_mode():
                model.generate(
                    prompt,
                    max_new_tokens=num_tokens,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            times_s.append(time.monotonic() - before)
        tpot_s = (times_s[1] - times_s[0]) / max(1, args.output - 1)
        samples.append(
            Sample(ttft_s=times_s[0], tpot_s=tpot_s, handoff_gap_s=None, num_tokens=args.output + 1)
        )
    report("c=1", samples, time.monotonic() - started)


if __name__ == "__main__":
    main()
