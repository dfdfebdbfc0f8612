"""python -m bench.latency: TTFT, TPOT, handoff gap and tok/s of a local cluster, closed loop.

    python -m bench.latency --prefill 1 --decode 1              # disaggregated, one core each
    python -m bench.latency --prefill 0 --decode 1 --threads 2  # colocated, the same two cores
    python -m bench.latency --transformers --threads 2          # transformers' generate, one by one

Times are the client's, except the gap from token 1 to token 2, which is the coordinator's. Each
node is pinned to cores of its own; the client and the coordinator run on all of them, as they
would on such a machine.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from bench.driver import Driven, drive_closed
from bench.measures import Dist, measure
from bench.prompts import VOCAB, with_prompts
from bench.records import OK, RequestRecord
from bench.targets import OurTarget, pin
from bench.workload import Arrival, Workload
from coordinator.supervisor import Cluster
from engine.catalog import resolve_model


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
        with tempfile.TemporaryDirectory() as folder:
            log_dir = Path(folder)
            asyncio.run(measure_cluster(args, log_dir))
            # The cluster is down: its engines have told what they did.
            for log in sorted(log_dir.glob("*.log")):
                for line in log.read_text().splitlines():
                    if "engine stopped" in line:
                        print(f"{log.stem}: {line.partition('engine stopped ')[2]}")


async def measure_cluster(args: argparse.Namespace, log_dir: Path) -> None:
    rng = random.Random(args.seed)
    async with Cluster(
        model=args.model,
        num_prefill=args.prefill,
        num_decode=args.decode,
        node_options={"dtype": args.dtype, "threads": args.threads},
        log_dir=log_dir,
    ) as cluster:
        print(pin(cluster, threads=args.threads))
        target = OurTarget(cluster.address)
        # Once through, not counted.
        await run(target, num_input=64, num_output=8, concurrency=2, num_requests=4, rng=rng)
        for concurrency in args.concurrency:
            driven = await run(
                target,
                num_input=args.input,
                num_output=args.output,
                concurrency=concurrency,
                num_requests=max(args.requests, concurrency),
                rng=rng,
            )
            report(f"c={concurrency}", driven)
        await target.close()


async def run(
    target: OurTarget,
    *,
    num_input: int,
    num_output: int,
    concurrency: int,
    num_requests: int,
    rng: random.Random,
) -> Driven:
    """num_requests requests, concurrency at a time. Raises RuntimeError where one is not served."""
    arrival = Arrival(at_s=0.0, num_input=num_input, num_output=num_output)
    workload = Workload(name="", arrivals=(arrival,) * num_requests)
    requests = with_prompts(workload, seed=rng.getrandbits(32), vocab=await target.vocab())
    driven = await drive_closed(target, requests, concurrency=concurrency)
    for record in driven.records:
        if record.outcome != OK:
            raise RuntimeError(f"request {record.index} {record.outcome}: {record.error}")
    return driven


def report(name: str, driven: Driven) -> None:
    """Medians in one line; disagg bench run shows everything else."""
    measures = measure(driven.records, wall_s=driven.wall_s)
    print(
        f"{name:12} n={measures.num_offered:3}"
        f" | TTFT p50 {_p50(measures.ttft_ms, 7)}"
        f" | TPOT p50 {_p50(measures.tpot_ms, 6)}"
        f" | token 1 to 2 p50 {_p50(measures.handoff_gap_ms, 6)}"
        f" | {measures.output_tok_s:6.1f} output tok/s",
        flush=True,
    )


def _p50(dist: Dist | None, width: int) -> str:
    return " " * (width + 3) if dist is None else f"{dist.p50:{width}.1f} ms"


def measure_transformers(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    folder = resolve_model(args.model, allow_download=False).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    rng = random.Random(args.seed)

    def generate_s(prompt: torch.Tensor, num_tokens: int) -> float:
        before = time.monotonic()
        with torch.inference_mode():
            model.generate(
                prompt,
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return time.monotonic() - before

    records, began_s = [], 0.0
    for index in range(max(3, args.requests // 4)):
        prompt = torch.tensor([rng.choices(VOCAB, k=args.input)])
        first_s, all_s = generate_s(prompt, 1), generate_s(prompt, args.output)
        first, last = (began_s + first_s, 1), (began_s + all_s, args.output - 1)
        records.append(
            RequestRecord(
                index=index,
                offered_s=began_s,
                sent_s=began_s,
                num_input=args.input,
                num_output=args.output,
                chunks=(first, last) if args.output > 1 else (first,),
                ended_s=began_s + all_s,
            )
        )
        began_s += all_s
    report("c=1", Driven(records=records, wall_s=began_s))


if __name__ == "__main__":
    main()
