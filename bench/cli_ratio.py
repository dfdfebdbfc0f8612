"""disagg bench ratio: options, and from them to a sweep, table and report."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

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
    Requests,
    Sample,
    Seed,
    Tpot,
    Trace,
    Ttft,
    describe_recipe,
    make_new,
    recipe_of,
    run_on_loop,
    write_result,
)
from bench.deployment import parse_deployment, splits
from bench.measured import GoodputRun
from bench.prediction import find_profile, predictor
from bench.ratio import RatioPoint, advice, sweep
from bench.report.folders import RATIO_FILE, write_ratio_report
from bench.report.ratio_page import ratio_table, split_of
from bench.report.table import print_table
from bench.slo import Slo
from coordinator.exits import exit_code_of_errors, report


def ratio(
    folder: Folder,
    ttft_ms: Ttft,
    tpot_ms: Tpot,
    nodes: Annotated[int, typer.Option(min=2, help="Every split of so many.")] = 4,
    deployments: Annotated[
        list[str] | None, typer.Argument(help="Instead: only these, for example 1P3D 2P2D.")
    ] = None,
    model: Model = "emulated",
    threads: Annotated[int, typer.Option(min=1, help="Of each node.")] = 1,
    kv_memory_gb: KvMemory = 1.0,
    rate: Annotated[float, typer.Option(min=0.001, help="The first to try, per second.")] = 4.0,
    requests: Requests = 100,
    num_input: Input = "256",
    num_output: Output = "64",
    trace: Trace = None,
    sample: Sample = 1.0,
    length_scale: LengthScale = 1.0,
    max_input: MaxInput = None,
    max_output: MaxOutput = None,
    burstiness: Burstiness = 1.0,
    profile: Annotated[
        Path | None,
        typer.Option(help="Of python -m bench.cost_profile, to predict from; emulated: its own."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Which prefill:decode ratio? Goodput of every split, beside the plan's prediction."""
    with exit_code_of_errors():
        chosen = [parse_deployment(name) for name in deployments or []]
        chosen = chosen or list(splits(nodes, threads=threads))
        make_new(folder)
        slo = Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
        recipe = recipe_of(
            num_input, num_output, trace, rate, requests, sample, length_scale, max_input,
            max_output, burstiness,
        )  # fmt: skip
        costs = find_profile(model, profile)
        points = run_on_loop(
            sweep(
                chosen,
                model=model,
                kv_memory_gb=kv_memory_gb,
                folder=folder,
                search=GoodputRun(recipe=recipe, slo=slo, folder=folder, start_per_s=rate),
                seed=seed,
                predict=None
                if costs is None
                else predictor(
                    model=model,
                    kv_memory_gb=kv_memory_gb,
                    profile=costs,
                    recipe=recipe,
                    slo=slo,
                    start_per_s=rate,
                ),
                tell=_tell_point,
            )
        )
        problems = [f"{point.name}: {why}" for point in points for why in point.problems]
        write_result(
            folder / RATIO_FILE,
            {"points": [point.to_dict() for point in points], "advice": advice(points)},
            validity={"is_valid": not problems, "reasons": problems},
            slo=asdict(slo),
            model=model,
            kv_memory_gb=kv_memory_gb,
            workload=describe_recipe(recipe),
            seed=seed,
        )
        print_table(ratio_table([split_of(point.to_dict()) for point in points]))
        typer.echo(advice(points))
        report(f"written: {write_ratio_report(folder)}")


def _tell_point(point: RatioPoint) -> None:
    predicted = "" if point.predicted_rps is None else f", predicted {point.predicted_rps:.3g}"
    report(f"{point.name}: {point.goodput_rps:.3g} requests/s{predicted}")
