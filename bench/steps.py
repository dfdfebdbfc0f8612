"""python -m bench.steps: how long prefill and decode steps take on one node's executor.

With --llama-bench (llama.cpp's program) and --gguf (the same weights), both in turns, as ratios.
Steps are whole Executor.execute calls: greedy draw and Python included, no serving.
"""

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path

from bench.cost_profile import Spans, load, measure

CASES: dict[str, Spans] = {
    "prefill 256": ((0, 256),),
    "prefill 1024": ((0, 1024),),
    "batch 1, context 256": ((255, 1),),
    "batch 4, context 256": ((255, 1),) * 4,
    "batch 16, context 256": ((255, 1),) * 16,
    "batch 1, context 1024": ((1023, 1),),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.steps")
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--dtype", default="bfloat16")
    add("--threads", type=int, default=1)
    add("--block-size", type=int, default=16)
    add("--rounds", type=int, default=3)
    add("--llama-bench", type=Path, help="llama.cpp's program")
    add("--gguf", type=Path, help="the model's weights in the same dtype, for llama-bench")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    executor, num_blocks = load(args)
    ours: dict[str, list[float]] = {name: [] for name in CASES}
    theirs: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(args.rounds):
        for name, spans in CASES.items():
            ours[name].append(measure(executor, spans, num_blocks)[1])
            if args.llama_bench and len(spans) == 1:
                start, length = spans[0]
                theirs[name].append(_llama_ms(args, start=start, length=length))
    print("| median ms (range) | disagg | llama.cpp | ratio |\n|--|--|--|--|")
    for name in CASES:
        cells = [_spread(ours[name]), "", ""]
        if theirs[name]:
            ratio = statistics.median(ours[name]) / statistics.median(theirs[name])
            cells[1:] = [_spread(theirs[name]), f"{ratio:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def _llama_ms(args: argparse.Namespace, *, start: int, length: int) -> float:
    """Of one prefill of length tokens, or of one decoded token after start."""
    what = (
        ["-p", str(length), "-n", "0"] if start == 0 else ["-p", "0", "-n", "16", "-d", str(start)]
    )
    command = [args.llama_bench, "-m", args.gguf, "-t", str(args.threads), "-r", "2", "-o", "json"]
    ended = subprocess.run([*command, *what], capture_output=True, check=True, timeout=300)
    result = json.loads(ended.stdout)[0]
    num_tokens = length if start == 0 else 1
    return num_tokens * 1e3 / float(result["avg_ts"])


def _spread(times_ms: list[float]) -> str:
    median = statistics.median(times_ms)
    return f"{median:.1f} ({min(times_ms):.1f} to {max(times_ms):.1f})"


if __name__ == "__main__":
    main()
