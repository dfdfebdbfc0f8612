"""python -m bench.planted_check: is a planted slowdown of 20 % found, live, and nothing else?

Three comparisons, one after the other, of three emulated clusters that take turns: a deployment, a
twin of it, and one whose every step takes 1.2 times as long. The verdicts' rules (bench/verdict.py)
should call the slow one worse, and say "cannot tell" of the twin.
"""

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from bench.contender import Served
from bench.deployment import parse_deployment
from bench.emulated_model import emulated_model
from bench.figures import FIGURES
from bench.lengths import Fixed
from bench.measured import LoadRun
from bench.recipe import Recipe
from bench.rounds import run_rounds
from bench.run import LoadOptions
from bench.run_log import LoggedRun, pairs_of
from bench.slo import Slo
from bench.verdict import find

PLANTED = 1.2
# Milliseconds, long beside what the machine adds.
_PROFILE = {
    "base_ms": 20.0,
    "decode_row_ms": 0.5,
    "prefill_token_ms": 0.2,
    "decode_context_ms": 0.001,
    "prefill_context_ms": 0.0001,
}
_NAMES = ("as it is", "twin", "slower")
_JUDGED = ("ttft_p50_ms", "tpot_p50_ms", "itl_p50_ms", "e2e_p50_ms", "output_tok_s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planted_check")
    add = parser.add_argument
    add("--deployment", default="1P1D")
    add("--comparisons", type=int, default=3)
    add("--rounds", type=int, default=6)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    for number in range(args.comparisons):
        with tempfile.TemporaryDirectory(prefix="disagg-planted-") as folder:
            runs = asyncio.run(compare(args, Path(folder), seed=args.seed + number))
        print(f"comparison {number + 1}:")
        for line in verdicts(runs):
            print(f"  {line}", flush=True)


async def compare(args: argparse.Namespace, folder: Path, *, seed: int) -> list[LoggedRun]:
    """Everybody in every round, in both phases."""
    recipe = Recipe(num_input=Fixed(64), num_output=Fixed(32), rate_per_s=1.0, num_requests=16)
    measure = LoadRun(
        recipe=replace(recipe, seed=seed),
        slo=Slo(ttft_ms=1000, tpot_ms=100),
        folder=folder,
        options=LoadOptions(concurrency=4),
    )
    runs: list[LoggedRun] = []
    async with AsyncExitStack() as stack:
        contenders = [
            await stack.enter_async_context(
                Served(
                    parse_deployment(args.deployment),
                    model=str(
                        emulated_model(
                            folder / f"model {name}",
                            {cost: factor * value for cost, value in _PROFILE.items()},
                        )
                    ),
                    kv_memory_gb=0.001,
                    log_dir=folder / name,
                    name=name,
                )
            )
            for name, factor in zip(_NAMES, (1.0, 1.0, PLANTED), strict=True)
        ]
        for phase, taking_part in (("aa", contenders[:2]), ("ab", contenders)):
            runs += await run_rounds(
                taking_part,
                phase=phase,
                num_rounds=args.rounds,
                seed=seed,
                folder=folder,
                measure=measure,
                tell=lambda run: None,
            )
    return runs


def verdicts(runs: list[LoggedRun]) -> list[str]:
    """Of the twin and of the slow one against the deployment as it is, a line per figure."""
    lines = []
    for figure in (figure for figure in FIGURES if figure.name in _JUDGED):
        same = pairs_of(figure, runs, phase="aa", candidate="twin", rival="as it is")
        words = []
        for name in _NAMES[1:]:
            pairs = pairs_of(figure, runs, phase="ab", candidate=name, rival="as it is")
            words.append(f"{name} {find(figure, rival=name, same=same, pairs=pairs).describe()}")
        lines.append(f"{figure.title}: {'; '.join(words)}")
    return lines


if __name__ == "__main__":
    main()
