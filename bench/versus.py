"""python -m bench.versus --peer-url URL: ours against a running server, in turns, as ratios.

    python -m bench.versus --peer-url http://127.0.0.1:8100 --peer-pid 1234 --threads 1

Absolute figures drift between machines and hours; two servers measured in turns in one session do
not. The peer speaks OpenAI's HTTP API and serves the same model; it is frozen (--peer-pid, with
all its children) while ours is measured, so that it cannot spin beside it. Ours is colocated, or
1+1 with --prefill 1. Ratios are ours / peer of the medians over all rounds.
"""

import argparse
import asyncio
import random
import signal
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.load import Summary, Target, report, run
from bench.targets import OpenAITarget, OurTarget, pin
from coordinator.supervisor import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One row of the comparison."""

    num_input: int
    num_output: int
    concurrency: int
    num_requests: int

    @property
    def name(self) -> str:
        return f"{self.num_input}/{self.num_output} c={self.concurrency}"


LOADS = (
    Load(num_input=256, num_output=64, concurrency=1, num_requests=4),
    Load(num_input=1024, num_output=16, concurrency=1, num_requests=4),
    Load(num_input=256, num_output=64, concurrency=4, num_requests=8),
    Load(num_input=256, num_output=64, concurrency=16, num_requests=32),
    Load(num_input=256, num_output=64, concurrency=32, num_requests=32),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.versus")
    add = parser.add_argument
    add("--peer-url", required=True)
    add("--peer-model", default="smol", help="the name that the peer serves the model under")
    add("--peer-pid", type=int, help="frozen, with its children, while ours is measured")
    add("--model", default="smollm2-135m")
    add("--prefill", type=int, default=0, help="prefill nodes of ours; 0: colocated")
    add("--threads", type=int, default=1, help="of each node of ours; the peer's are its own")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=0)
    asyncio.run(compare(parser.parse_args()))


async def compare(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    peer = OpenAITarget(args.peer_url, model=args.peer_model)
    with tempfile.TemporaryDirectory() as log_dir:
        async with Cluster(
            model=args.model,
            num_prefill=args.prefill,
            num_decode=1,
            node_options={"threads": args.threads},
            log_dir=Path(log_dir),
        ) as cluster:
            pin(cluster, threads=args.threads)
            ours = OurTarget(cluster.address)
            results: dict[Load, tuple[list[Summary], list[Summary]]] = {
                load: ([], []) for load in LOADS
            }
            for number in range(args.rounds + 1):
                for load, (our_results, peer_results) in results.items():
                    with frozen(args.peer_pid):
                        our_result = await measure(ours, load, rng)
                    peer_result = await measure(peer, load, rng)
                    if number == 0:
                        continue  # once through on both sides, not counted
                    report(f"ours {load.name}", our_result)
                    report(f"peer {load.name}", peer_result)
                    our_results.append(our_result)
                    peer_results.append(peer_result)
            await ours.close()
    await peer.close()
    for load, (our_results, peer_results) in results.items():
        write_ratios(load, our_results, peer_results)


async def measure(target: Target, load: Load, rng: random.Random) -> Summary:
    return await run(
        target,
        num_input=load.num_input,
        num_output=load.num_output,
        concurrency=load.concurrency,
        num_requests=load.num_requests,
        rng=rng,
    )


@contextmanager
def frozen(pid: int | None) -> Iterator[None]:
    """Stops a process and its children for the time of the block."""
    processes = []
    if pid is not None:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def write_ratios(load: Load, ours: list[Summary], peer: list[Summary]) -> None:
    def ratio(figure: str) -> str:
        our_values = [getattr(summary, figure) for summary in ours]
        peer_values = [getattr(summary, figure) for summary in peer]
        pairs = [a / b for a, b in zip(our_values, peer_values, strict=True)]
        middle = statistics.median(our_values) / statistics.median(peer_values)
        return f"{middle:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"

    print(
        f"ours / peer {load.name:14}"
        f" | TTFT {ratio('ttft_ms')} | TPOT {ratio('tpot_ms')} | tok/s {ratio('tokens_per_s')}"
    )


if __name__ == "__main__":
    main()
