"""What the commands that compare have in common: options, and from them to values and files."""

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop

from bench.compare import Peer
from bench.figures import ATTAINMENT, GOODPUT
from bench.lengths import parse_lengths
from bench.machine import describe_machine
from bench.recipe import Recipe
from bench.run_log import RUNS_FILE, LoggedRun
from bench.traces import read_trace
from coordinator.exits import report

Result = TypeVar("Result")

# Figures that are told of each run as it ends.
_TOLD = (GOODPUT.name, ATTAINMENT.name, "ttft_p50_ms", "itl_p99_ms")

Model = Annotated[str, typer.Option(help="Of our clusters; 'emulated' computes nothing.")]
KvMemory = Annotated[
    float, typer.Option("--kv-memory-gb", min=0.001, help="Of each deployment, all nodes together.")
]
Input = Annotated[
    str, typer.Option("--input", help="Prompt tokens: 256, uniform:50:400, lognormal:200:0.8.")
]
Output = Annotated[str, typer.Option("--output", help="Tokens to generate, alike.")]
Trace = Annotated[
    Path | None, typer.Option(help="Azure CSV, Mooncake JSONL, or a JSONL of prompts.")
]
Sample = Annotated[float, typer.Option(help="Share of the trace's requests.")]
LengthScale = Annotated[float, typer.Option(help="Of the trace's lengths.")]
MaxInput = Annotated[int | None, typer.Option(min=1, help="Cut longer prompts.")]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Cut longer answers.")]
Burstiness = Annotated[
    float, typer.Option(min=0.0, help="Deviation of gaps / mean: 0 constant, 1 Poisson.")
]
Requests = Annotated[int, typer.Option(min=1, help="Of each run.")]
Ttft = Annotated[float, typer.Option("--ttft-ms", help="SLO: time to the first token.")]
Tpot = Annotated[float, typer.Option("--tpot-ms", help="SLO: mean time of each further token.")]
Peers = Annotated[
    list[str] | None, typer.Option("--peer", help="URL of an OpenAI-style server; repeatable.")
]
PeerModels = Annotated[
    list[str] | None, typer.Option("--peer-model", help="Its model's name; one, or one per peer.")
]
PeerPids = Annotated[
    list[str] | None,
    typer.Option("--peer-pid", help="To freeze with their children: 12 or 12,34; one per peer."),
]
Rounds = Annotated[int, typer.Option(min=1, help="Everyone is measured once in each.")]
Seed = Annotated[int, typer.Option(min=0, help="Of all requests; another one for another try.")]
Folder = Annotated[Path, typer.Option("-o", "--output-folder", help="New; for runs and report.")]


def recipe_of(
    num_input: str,
    num_output: str,
    trace: Path | None,
    rate: float,
    requests: int,
    sample: float,
    length_scale: float,
    max_input: int | None,
    max_output: int | None,
    burstiness: float,
) -> Recipe:
    return Recipe(
        num_input=parse_lengths(num_input),
        num_output=parse_lengths(num_output),
        trace=None if trace is None else read_trace(trace),
        rate_per_s=rate,
        cv=burstiness,
        num_requests=requests,
        sample=sample,
        length_scale=length_scale,
        max_input=max_input,
        max_output=max_output,
    )


def peers_of(
    urls: Sequence[str] | None, models: Sequence[str] | None, pids: Sequence[str] | None
) -> list[Peer]:
    urls, names, groups = list(urls or []), list(models or ["default"]), list(pids or [""])
    names = names * len(urls) if len(names) == 1 else names
    groups = groups * len(urls) if groups == [""] else groups
    if not len(urls) == len(names) == len(groups):
        raise ValueError("give one --peer-model for all or one per --peer, and one --peer-pid each")
    return [
        Peer(url=url, model=model, pids=tuple(int(pid) for pid in group.split(",") if pid))
        for url, model, group in zip(urls, names, groups, strict=True)
    ]


def describe_recipe(recipe: Recipe) -> dict[str, object]:
    name = recipe.trace.name if recipe.trace else f"{recipe.num_input} in, {recipe.num_output} out"
    return {
        "name": name,
        "rate_per_s": recipe.rate_per_s,
        "requests": recipe.num_requests,
        "burstiness": recipe.cv,
    }


def make_new(folder: Path) -> None:
    """Raises ValueError for one that holds runs: another comparison's would be taken for ours."""
    if (folder / RUNS_FILE).exists():
        raise ValueError(f"{folder} holds the runs of another measurement")
    folder.mkdir(parents=True, exist_ok=True)


def write_result(path: Path, result: Mapping[str, Any], **facts: object) -> None:
    path.write_text(json.dumps({**result, "machine": describe_machine(), **facts}, indent=1) + "\n")


def run_on_loop(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def tell_run(run: LoggedRun) -> None:
    values = {name: run.figures.get(name) for name in _TOLD}
    told = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
    report(f"{run.phase} {run.round} {run.name}: {told}" + "".join(f"; {p}" for p in run.problems))
