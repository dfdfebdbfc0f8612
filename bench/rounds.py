"""Runs in turns: every round measures every contender once, each round beginning with another one.

    round 0: A B C    round 1: B C A    round 2: C A B    ...

All runs of a round have the same requests (one seed), another round has others. Each run's figures
go to FOLDER/runs.jsonl as soon as it has ended.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contender import Contender
from bench.run_log import LoggedRun, append_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of a run by name, the file of its requests, and what makes it doubtful."""

    figures: Mapping[str, float | None]
    records: str = ""
    problems: tuple[str, ...] = ()


# Called with a contender that is awake, a label for files, and the seed of the requests.
Measure = Callable[[Contender, str, int], Awaitable[Measured]]
Tell = Callable[[LoggedRun], None]


async def run_rounds(
    contenders: Sequence[Contender],
    *,
    phase: str,
    num_rounds: int,
    seed: int,
    folder: Path,
    measure: Measure,
    tell: Tell,
) -> list[LoggedRun]:
    """All runs, in the order in which they ran."""
    runs = []
    for number in range(num_rounds):
        for contender in rotated(contenders, number):
            label = f"{phase}-{number:02}-{contender.name}"
            async with contender.awake():
                measured = await measure(contender, label, round_seed(seed, phase, number))
            run = LoggedRun(
                phase=phase,
                round=number,
                name=contender.name,
                figures=measured.figures,
                records=measured.records,
                problems=measured.problems,
            )
            append_run(folder, run)
            tell(run)
            runs.append(run)
    return runs


def rotated(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """All of them, beginning with the number-th."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def round_seed(seed: int, phase: str, number: int) -> int:
    """Of a round's requests: no two rounds share prompts, or a prefix cache would answer."""
    return 2 * (1000 * seed + number) + (phase == "ab")
