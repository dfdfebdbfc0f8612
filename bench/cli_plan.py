"""disagg plan: options, and from them to a question, predictions and advice."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench.lengths import parse_lengths
from bench.plan.advice import advise
from bench.plan.demand import Demand, MadeUp, Recorded
from bench.plan.outlooks import Question, every_split, outlooks
from bench.plan.planned_nodes import (
    NodeChanges,
    TypedFigures,
    known_nodes,
    planned_cluster,
    with_all_threads,
)
from bench.plan.profiles import read_profile_file
from bench.plan.tables import outlook_tables, to_json
from bench.report.table import print_table
from bench.slo import Slo
from bench.traces import read_trace
from coordinator.exits import exit_code_of_errors, report

Milliseconds = Annotated[float | None, typer.Option(min=0.0, help="Of every node's profile.")]


def plan(
    nodes: Annotated[int, typer.Option(min=1, help="Machines to split into roles.")],
    ttft_ms: Annotated[float, typer.Option("--ttft-ms", min=0.1, help="SLO.")],
    tpot_ms: Annotated[float, typer.Option("--tpot-ms", min=0.1, help="SLO.")],
    coordinator: Annotated[
        str | None, typer.Option(help="Of a cluster that runs: plan with nodes like its own.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Of a node, by python -m bench.cost_profile.")
    ] = None,
    prefill_profile: Annotated[
        Path | None, typer.Option(help="Of prefill nodes, where they are others.")
    ] = None,
    wide_profile: Annotated[
        Path | None, typer.Option(help="Of one node with all threads: colocated 1 x N too.")
    ] = None,
    base_ms: Milliseconds = None,
    row_ms: Milliseconds = None,
    token_ms: Milliseconds = None,
    decode_context_ms: Milliseconds = None,
    prefill_context_ms: Milliseconds = None,
    prefill_speed: Annotated[
        float, typer.Option(min=0.001, help="Prefill nodes are so many times as fast.")
    ] = 1.0,
    decode_speed: Annotated[
        float, typer.Option(min=0.001, help="Decode nodes, and colocated ones, are.")
    ] = 1.0,
    bandwidth_gbs: Annotated[
        float, typer.Option("--bandwidth-gbs", min=0.0001, help="Of a node's link, GB/s.")
    ] = 1.2,
    kv_memory_gb: Annotated[
        float | None, typer.Option("--kv-memory-gb", min=0.000001, help="Of each node.")
    ] = None,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option(min=4, help="Of the model, where the profile does not tell.")
    ] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Of each node.")] = None,
    step_budget_ms: Annotated[
        float | None, typer.Option("--step-budget-ms", min=0.1, help="Of each node.")
    ] = None,
    num_input: Annotated[
        str, typer.Option("--input", help="Prompt tokens: 256, uniform:50:400, lognormal:200:0.8.")
    ] = "512",
    num_output: Annotated[str, typer.Option("--output", help="Tokens to generate, alike.")] = "64",
    trace: Annotated[Path | None, typer.Option(help="Azure CSV or Mooncake JSONL instead.")] = None,
    max_input: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Cut longer answers.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests/s; a trace's own by default.")
    ] = None,
    requests: Annotated[int, typer.Option(min=10, help="Of each simulation, at least.")] = 300,
    duration_s: Annotated[
        float, typer.Option("--duration-s", min=0.0, help="Of each simulation, at least.")
    ] = 30.0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Simulations of each; their range is the error band.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Should I disaggregate, and how many of each? Simulates every split of the nodes."""
    changes = NodeChanges(
        figures=TypedFigures(
            base_ms=base_ms,
            decode_row_ms=row_ms,
            prefill_token_ms=token_ms,
            decode_context_ms=decode_context_ms,
            prefill_context_ms=prefill_context_ms,
        ),
        prefill_speed=prefill_speed,
        decode_speed=decode_speed,
        kv_memory_gb=kv_memory_gb,
        kv_bytes_per_token=kv_bytes_per_token,
        max_running=max_running,
        step_budget_ms=step_budget_ms,
    )
    with exit_code_of_errors(coordinator=coordinator or ""):
        known = known_nodes(coordinator=coordinator, profile=profile, figures=changes.figures)
        if prefill_profile is not None:
            other = read_profile_file(prefill_profile).profile
            known = replace(known, prefill=replace(known.prefill, profile=other))
        cluster = planned_cluster(known, changes, num_nodes=nodes, bandwidth_gbs=bandwidth_gbs)
        clusters = every_split(cluster, num_nodes=nodes)
        if wide_profile is not None:
            clusters.insert(0, with_all_threads(cluster, wide_profile))
        demand: Demand
        if trace is None:
            demand = MadeUp(
                num_input=parse_lengths(num_input),
                num_output=parse_lengths(num_output),
                num_requests=requests,
                min_duration_s=duration_s,
            )
        else:
            recorded = read_trace(trace).limited(max_input=max_input, max_output=max_output)
            demand = Recorded(trace=recorded, num_requests=requests, min_duration_s=duration_s)
            rate = rate or recorded.rate_per_s
        question = Question(
            demand=demand,
            slo=Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms),
            rate_per_s=rate,
            seeds=tuple(range(seeds)),
        )
        found = outlooks(
            question,
            clusters,
            tell=lambda done: report(f"{done} of {len(clusters)} deployments simulated"),
        )
        advice = advise(found)
    if as_json:
        sys.stdout.write(json.dumps(to_json(found, advice)) + "\n")
        return
    for table in outlook_tables(found):
        print_table(table)
    for sentence in advice:
        typer.echo(sentence)
