"""disagg bench run: options, and from them to a run, its files and its table."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from bench.deployment import Deployment
from bench.lengths import parse_lengths
from bench.live import live_line
from bench.open_target import LocalCluster, Opened, Remote, Where, open_target
from bench.recipe import Recipe
from bench.report.folders import write_run_report
from bench.report.measure_tables import count_table, latency_table
from bench.report.table import print_table
from bench.run import Goodput, LoadOptions, Outcome, check_fits, find_goodput, run_load, warm_up
from bench.run_files import summarise, write_run
from bench.slo import Slo
from bench.traces import read_trace
from coordinator.exits import ExitCode, exit_code_of_errors, report

_ENDLESS_REQUESTS = 10_000
_DEFAULT_DURATION_S = 30.0


def run(
    coordinator: Annotated[
        str | None, typer.Option(help="A coordinator that runs. Default: a cluster started here.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server instead.")] = None,
    served_model: Annotated[str, typer.Option(help="The model's name at --url.")] = "default",
    model: Annotated[str, typer.Option(help="Of the cluster started here.")] = "smollm2-135m",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill nodes; 0: colocated.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Of each node.")] = 1,
    kv_memory_gb: Annotated[
        float | None, typer.Option("--kv-memory-gb", min=0.001, help="Of all nodes together.")
    ] = None,
    num_input: Annotated[
        str, typer.Option("--input", help="Prompt tokens: 256, uniform:50:400, lognormal:200:0.8.")
    ] = "256",
    num_output: Annotated[str, typer.Option("--output", help="Tokens to generate, alike.")] = "64",
    trace: Annotated[
        Path | None, typer.Option(help="Azure CSV, Mooncake JSONL, or a JSONL of prompts.")
    ] = None,
    sample: Annotated[float, typer.Option(help="Share of the trace's requests.")] = 1.0,
    speed: Annotated[float, typer.Option(help="Of the trace: 60 makes an hour a minute.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Of the trace's lengths.")] = 1.0,
    max_input: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Cut longer answers.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second, sent when due.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=0.0, help="Deviation of gaps / mean: 0 constant, 1 Poisson.")
    ] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="So many requests at a time instead.")
    ] = None,
    duration_s: Annotated[float | None, typer.Option("--duration-s", min=0.1)] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
    ttft_ms: Annotated[float | None, typer.Option("--ttft-ms", help="SLO; with --tpot-ms.")] = None,
    tpot_ms: Annotated[float | None, typer.Option("--tpot-ms", help="SLO.")] = None,
    itl_p99_ms: Annotated[
        float | None, typer.Option("--itl-p99-ms", help="SLO: p99 of one request's gaps.")
    ] = None,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Search the highest rate that keeps the SLO.")
    ] = False,
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0.1, help="For answers after the last request.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Another one for another run.")] = 0,
    folder: Annotated[
        Path | None, typer.Option("-o", "--output-folder", help="For requests, summary, report.")
    ] = None,
) -> None:
    """Put load on a server and measure what its users would see."""
    with exit_code_of_errors(coordinator=coordinator or url or "the cluster"):
        slo = _slo(ttft_ms, tpot_ms, itl_p99_ms)
        if goodput and (slo is None or concurrency is not None):
            raise ValueError("--goodput needs --ttft-ms and --tpot-ms, and no --concurrency")
        if requests is None and duration_s is None:
            duration_s = _DEFAULT_DURATION_S
        recipe = Recipe(
            num_input=parse_lengths(num_input),
            num_output=parse_lengths(num_output),
            trace=None if trace is None else read_trace(trace),
            # A closed loop and a search have no rate of their own; any will do to make requests.
            rate_per_s=1.0 if rate is None and (goodput or concurrency) else rate,
            cv=burstiness,
            num_requests=_ENDLESS_REQUESTS if concurrency and requests is None else requests,
            duration_s=None if concurrency else duration_s,
            sample=sample,
            speed=speed,
            length_scale=length_scale,
            max_input=max_input,
            max_output=max_output,
            seed=seed,
        )
        where = _where(
            coordinator, url, served_model, prefill, decode, threads, model, kv_memory_gb
        )
        options = LoadOptions(
            concurrency=concurrency,
            duration_s=duration_s,
            drain_s=drain_s,
            watch=live_line("load"),
        )
        measuring = _measure(
            where, recipe, slo=slo, goodput_from=recipe.rate_per_s if goodput else None,
            options=options,
        )  # fmt: skip
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome, summary = runner.run(measuring)
        _show(summary)
        if folder is not None:
            write_run(folder, summary, outcome)
            report(f"written: {write_run_report(folder)}")
        if not summary["validity"]["is_valid"]:
            raise typer.Exit(ExitCode.FAILED)


async def _measure(
    where: Where,
    recipe: Recipe,
    *,
    slo: Slo | None,
    goodput_from: float | None,
    options: LoadOptions,
) -> tuple[Outcome, dict[str, Any]]:
    workload = recipe.workload()
    async with open_target(where) as opened:
        check_fits(workload, max_model_len=await opened.target.max_model_len())
        await warm_up(opened.target, seed=recipe.seed)
        found: Goodput | None = None
        if goodput_from is not None and slo is not None:
            found = await find_goodput(
                opened.target,
                recipe,
                slo=slo,
                start_per_s=goodput_from,
                options=options,
                tell=lambda rate, share: report(f"{rate:.3g} requests/s: {share:.1%} kept the SLO"),
            )
            outcome = found.best
        else:
            outcome = await run_load(opened.target, workload, seed=recipe.seed, options=options)
    return outcome, summarise(
        outcome,
        name=opened.name,
        seed=recipe.seed,
        slo=slo,
        goodput=found,
        facts=_facts(opened, options, recipe),
    )


def _facts(opened: Opened, options: LoadOptions, recipe: Recipe) -> dict[str, object]:
    if options.concurrency is not None:
        arrivals = f"closed loop, {options.concurrency} at a time"
    elif recipe.trace is not None:
        arrivals = "open loop, as in the trace"
    else:
        arrivals = f"open loop, gaps with a deviation of {recipe.cv:g} of their mean"
    return {**opened.facts, "arrivals": arrivals, "drain_s": options.drain_s}


def _show(summary: dict[str, Any]) -> None:
    measures = summary["measures"]
    slo = summary.get("slo") or {}
    words = ", ".join(f"{name} {value:g}" for name, value in slo.items() if value is not None)
    print_table(latency_table(measures))
    print_table(count_table(measures, slo=words, attainment=summary.get("attainment")))
    if "goodput" in summary:
        typer.echo(f"goodput: {summary['goodput']['rate_per_s']:.3g} requests/s")
    for reason in summary["validity"]["reasons"]:
        report(f"INVALID: {reason}")


def _slo(ttft_ms: float | None, tpot_ms: float | None, itl_p99_ms: float | None) -> Slo | None:
    if ttft_ms is None and tpot_ms is None and itl_p99_ms is None:
        return None
    if ttft_ms is None or tpot_ms is None:
        raise ValueError("an SLO needs both --ttft-ms and --tpot-ms")
    return Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms, itl_p99_ms=itl_p99_ms)


def _where(
    coordinator: str | None,
    url: str | None,
    served_model: str,
    prefill: int,
    decode: int,
    threads: int,
    model: str,
    kv_memory_gb: float | None,
) -> Where:
    if coordinator is not None and url is not None:
        raise ValueError("--coordinator and --url exclude each other")
    if coordinator is not None:
        return Remote(address=coordinator)
    if url is not None:
        return Remote(address=url, served_model=served_model)
    deployment = Deployment(num_prefill=prefill, num_decode=decode, threads=threads)
    return LocalCluster(deployment=deployment, model=model, kv_memory_gb=kv_memory_gb)
