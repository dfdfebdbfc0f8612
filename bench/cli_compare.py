"""disagg bench compare: options, and from them to runs, verdict, table and report."""

from dataclasses import asdict
from typing import Annotated

import typer

from bench.compare import ComparePlan
from bench.compare import compare as run_comparison
from bench.compare_options import (
    Burstiness,
    Folder,
    Input,
    KvMemory,
    LengthScale,
    MaxInput,
    MaxOutput,
    Model,
    Output,
    PeerModels,
    PeerPids,
    Peers,
    Requests,
    Rounds,
    Sample,
    Seed,
    Tpot,
    Trace,
    Ttft,
    describe_recipe,
    make_new,
    peers_of,
    recipe_of,
    run_on_loop,
    tell_run,
    write_result,
)
from bench.deployment import parse_deployment
from bench.figures import FIGURES
from bench.measured import GoodputRun, LoadRun
from bench.report.facts import slo_text
from bench.report.folders import COMPARISON_FILE, write_compare_report
from bench.report.side_by_side import comparison_table
from bench.report.table import print_table
from bench.rounds import Measure
from bench.run import LoadOptions
from bench.slo import Slo
from coordinator.exits import exit_code_of_errors, report


def compare(
    folder: Folder,
    ttft_ms: Ttft,
    tpot_ms: Tpot,
    deployment: Annotated[
        str, typer.Argument(help="2P1D, 1P1Dx4; or 'colocated 1x2', for peers.")
    ] = "1P1D",
    model: Model = "smollm2-135m",
    kv_memory_gb: KvMemory = 1.0,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second.")] = 1.0,
    requests: Requests = 32,
    num_input: Input = "256",
    num_output: Output = "64",
    trace: Trace = None,
    sample: Sample = 1.0,
    length_scale: LengthScale = 1.0,
    max_input: MaxInput = None,
    max_output: MaxOutput = None,
    burstiness: Burstiness = 1.0,
    goodput: Annotated[
        bool,
        typer.Option("--goodput", help="Decide by goodput, searched from --rate on in each run."),
    ] = False,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="So many requests at a time instead of --rate.")
    ] = None,
    rounds: Rounds = 10,
    peers: Peers = None,
    peer_models: PeerModels = None,
    peer_pids: PeerPids = None,
    seed: Seed = 0,
) -> None:
    """Disaggregate or not? A split against colocated serving with the same cores and KV memory."""
    with exit_code_of_errors():
        if goodput and concurrency is not None:
            raise ValueError("--goodput is a rate, so that --concurrency cannot go with it")
        make_new(folder)
        slo = Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
        recipe = recipe_of(
            num_input, num_output, trace, rate, requests, sample, length_scale, max_input,
            max_output, burstiness,
        )  # fmt: skip
        plan = ComparePlan(
            deployment=parse_deployment(deployment),
            model=model,
            kv_memory_gb=kv_memory_gb,
            num_rounds=rounds,
            slo=slo_text(asdict(slo)),
            peers=tuple(peers_of(peers, peer_models, peer_pids)),
            seed=seed,
        )
        options = LoadOptions(concurrency=concurrency)
        measure: Measure = LoadRun(recipe=recipe, slo=slo, folder=folder, options=options)
        if goodput:
            measure = GoodputRun(recipe=recipe, slo=slo, folder=folder, start_per_s=rate)
        found = run_on_loop(run_comparison(plan, folder, measure=measure, tell=tell_run))
        write_result(
            folder / COMPARISON_FILE,
            found.to_dict(),
            slo=asdict(slo),
            model=model,
            kv_memory_gb=kv_memory_gb,
            workload=describe_recipe(recipe),
            concurrency=concurrency,
            rounds=rounds,
            seed=seed,
        )
        present = {name for values in found.medians.values() for name in values}
        table = comparison_table(
            candidate=found.candidate,
            figures=[figure for figure in FIGURES if figure.name in present],
            medians=found.medians,
            findings=found.findings,
        )
        print_table(table)
        typer.echo(found.sentence)
        report(f"written: {write_compare_report(folder)}")
