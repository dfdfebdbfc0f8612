"""disagg bench interfere: options, and from them to runs, table and report."""

from dataclasses import asdict
from typing import Annotated

import typer

from bench.compare_options import (
    Folder,
    KvMemory,
    Model,
    PeerModels,
    PeerPids,
    Peers,
    Rounds,
    Seed,
    make_new,
    peers_of,
    run_on_loop,
    tell_run,
    write_result,
)
from bench.contender import Contender, Outside, Served
from bench.deployment import parse_deployment
from bench.interfere import FIGURES, InterfereLoad
from bench.interfere_run import interfere as run_interference
from bench.report.folders import SUMMARY_FILE, write_interfere_report
from bench.report.side_by_side import medians_table
from bench.report.table import print_table
from coordinator.exits import exit_code_of_errors, report


def interfere(
    folder: Folder,
    deployments: Annotated[
        list[str] | None, typer.Argument(help="For example 1P1D 'colocated 1x2'.")
    ] = None,
    model: Model = "smollm2-135m",
    kv_memory_gb: KvMemory = 1.0,
    streams: Annotated[int, typer.Option(min=1, help="Steady ones, without a pause.")] = 4,
    num_input: Annotated[int, typer.Option("--input", min=1, help="Of steady streams.")] = 64,
    num_output: Annotated[int, typer.Option("--output", min=2, help="Of steady streams.")] = 256,
    long: Annotated[int, typer.Option(min=0, help="Tokens of a long prompt; 0: none.")] = 1500,
    every_s: Annotated[float, typer.Option("--every-s", min=0.01, help="Between them.")] = 2.0,
    duration_s: Annotated[float, typer.Option("--duration-s", min=0.1, help="Of a run.")] = 25.0,
    rounds: Rounds = 3,
    peers: Peers = None,
    peer_models: PeerModels = None,
    peer_pids: PeerPids = None,
    seed: Seed = 0,
) -> None:
    """What long prompts do to running streams, on deployments and peers in turns."""
    with exit_code_of_errors():
        named = [parse_deployment(name) for name in deployments or []]
        outside = peers_of(peers, peer_models, peer_pids)
        if not named and not outside:
            raise ValueError("name a deployment, for example 1P1D, or a --peer")
        make_new(folder)
        load = InterfereLoad(
            num_streams=streams,
            num_input=num_input,
            num_output=num_output,
            num_long_input=long,
            every_s=every_s,
            duration_s=duration_s,
        )
        contenders: list[Contender] = [
            Served(
                deployment,
                model=model,
                kv_memory_gb=kv_memory_gb,
                log_dir=folder / "logs" / deployment.name.replace(" ", "-"),
            )
            for deployment in named
        ]
        contenders += [Outside(peer.url, model=peer.model, pids=peer.pids) for peer in outside]
        runs = run_on_loop(
            run_interference(
                contenders, load, num_rounds=rounds, seed=seed, folder=folder, tell=tell_run
            )
        )
        write_result(
            folder / SUMMARY_FILE,
            {"load": asdict(load)},
            model=model,
            kv_memory_gb=kv_memory_gb,
            rounds=rounds,
            seed=seed,
        )
        print_table(medians_table(FIGURES, runs))
        report(f"written: {write_interfere_report(folder)}")
