"""runs.jsonl: the figures of every run of a comparison, one line each, in the order they ran.

    run --LoggedRun--> append_run --> FOLDER/runs.jsonl --read_runs--> pairs_of --> bench/verdict.py

phase "aa" is a deployment against another instance of itself, "ab" everything against everything.
Runs of one round belong together: they were measured one right after the other.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.verdict import Figure

RUNS_FILE = "runs.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """One run: of what, in which round, its figures by name, the file of its requests, and what
    the load generator found wrong with itself meanwhile."""

    phase: str
    round: int
    name: str
    figures: Mapping[str, float | None]
    records: str = ""
    problems: Sequence[str] = ()


def append_run(folder: Path, run: LoggedRun) -> None:
    with (folder / RUNS_FILE).open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def read_runs(folder: Path) -> list[LoggedRun]:
    """Raises ValueError, one line, for a folder that holds none."""
    path = folder / RUNS_FILE
    try:
        return [LoggedRun(**json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no runs: {error}") from error


def pairs_of(
    figure: Figure,
    runs: Iterable[LoggedRun],
    *,
    phase: str,
    candidate: str | None = None,
    rival: str | None = None,
) -> list[tuple[float | None, float | None]]:
    """(candidate, rival) per round that has both. Unnamed: the only two names of the phase."""
    of_phase = [run for run in runs if run.phase == phase]
    names = list(dict.fromkeys(run.name for run in of_phase))
    if candidate is None or rival is None:
        if len(names) != 2:
            return []
        candidate, rival = names
    by_round: dict[int, dict[str, float | None]] = {}
    for run in of_phase:
        by_round.setdefault(run.round, {})[run.name] = run.figures.get(figure.name)
    return _both(list(by_round.values()), candidate, rival)


def _both(
    rounds: Sequence[Mapping[str, float | None]], candidate: str, rival: str
) -> list[tuple[float | None, float | None]]:
    return [(one[candidate], one[rival]) for one in rounds if candidate in one and rival in one]
