"""python -m bench.cost_profile -o profile.json: measures how long steps take, and fits the model.

Steps of known shape run on one node's executor, in this process. Half of them fit the profile of
engine/cost_model.py; the other half, of shapes drawn at random, say how wrong it is.
"""

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path

from engine.calibration import fit
from engine.cost_model import CostProfile, StepShape, row_shape, total
from engine.executor import Draw, Executor, Row, StepPlan
from engine.sequence import SamplingParams
from engine.served_model import find_model

MAX_CONTEXT = 2048
MAX_ROWS = 32
# (start, tokens) of every row of a step.
Spans = tuple[tuple[int, int], ...]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cost_profile")
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--dtype", default="bfloat16")
    add("--threads", type=int, default=1)
    add("--block-size", type=int, default=16)
    add("--steps", type=int, default=60, help="held-out steps")
    add("--seed", type=int, default=0)
    add("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    executor, blocks = load(args)
    rng = random.Random(args.seed)
    fitted_on = [measure(executor, spans, blocks) for spans in grid()]
    profile = fit([shape for shape, _ in fitted_on], [time_ms for _, time_ms in fitted_on])
    held_out = [measure(executor, draw_spans(rng), blocks) for _ in range(args.steps)]
    write(args, executor, profile, fitted_on, held_out)


def load(args: argparse.Namespace) -> tuple[Executor, int]:
    model = find_model(args.model, dtype=args.dtype, block_size=args.block_size)
    num_blocks = MAX_ROWS * model.layout.blocks_for(MAX_CONTEXT)
    placed = model.place(num_blocks)
    # What was never written is read from one cached page of zeros, much faster than KV is.
    ones = memoryview(bytes([1]) * model.layout.block_bytes)
    for block in range(num_blocks):
        placed.memory.write([block], ones)
    return placed.load(lambda done, in_all: None, MAX_CONTEXT), num_blocks


def grid() -> list[Spans]:
    """Decode batches over rows and context, chunks over length and start, and mixes of both."""
    decode = [
        ((context, 1),) * rows for rows in (1, 2, 4, 8, 16, 32) for context in (64, 512, 1900)
    ]
    chunks = [
        ((start, length),)
        for length in (16, 64, 128, 256, 512)
        for start in (0, 512, 1408)
        if start + length <= MAX_CONTEXT
    ]
    mixes = [(*d[:8], *c) for d, c in zip(decode[6::3], chunks[::4], strict=False)]
    return decode + chunks + mixes


def draw_spans(rng: random.Random) -> Spans:
    """A step as a server sees it: some decode rows, sometimes a chunk."""
    rows = [(rng.randrange(1, MAX_CONTEXT - 1), 1) for _ in range(rng.randrange(0, MAX_ROWS))]
    if not rows or rng.random() < 0.5:
        length = rng.randrange(1, 33) * 16
        rows.append((rng.randrange(0, (MAX_CONTEXT - length) // 16 + 1) * 16, length))
    return tuple(rows)


def measure(executor: Executor, spans: Spans, num_blocks: int) -> tuple[StepShape, float]:
    """The step's shape and its median time; every row has blocks of its own."""
    per_row = num_blocks // MAX_ROWS
    draw = Draw(sampling=SamplingParams(), seed=0, choice=0, position=0)
    rows = tuple(
        Row(
            token_ids=[(7 * i) % executor.vocab_size for i in range(length)],
            start=start,
            block_table=tuple(range(index * per_row, (index + 1) * per_row)),
            draw=draw,
        )
        for index, (start, length) in enumerate(spans)
    )
    plan = StepPlan(rows=rows)
    executor.execute(plan)
    times_ms = []
    for _ in range(5):
        started = time.perf_counter()
        executor.execute(plan)
        times_ms.append(1e3 * (time.perf_counter() - started))
    shape = total(row_shape(start, length) for start, length in spans)
    return shape, statistics.median(times_ms)


def write(
    args: argparse.Namespace,
    executor: Executor,
    profile: CostProfile,
    fitted_on: list[tuple[StepShape, float]],
    held_out: list[tuple[StepShape, float]],
) -> None:
    errors = sorted(
        abs(profile.predict_ms(shape) - time_ms) / time_ms for shape, time_ms in held_out
    )
    median, p90 = errors[len(errors) // 2], errors[int(0.9 * len(errors))]
    print(profile)
    print(
        f"fitted on {len(fitted_on)} steps; {len(held_out)} held-out steps: "
        f"error median {median:.1%}, p90 {p90:.1%}, max {errors[-1]:.1%}"
    )
    document = {
        "model": args.model,
        "dtype": args.dtype,
        "threads": args.threads,
        "block_size": args.block_size,
        "kv_bytes_per_token": executor.layout.block_bytes // args.block_size,
        "cost_profile": asdict(profile),
        "held_out_error": {"median": median, "p90": p90, "max": errors[-1]},
    }
    args.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
