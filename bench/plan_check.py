"""How well disagg plan predicts: the same requests through the plan and through real servers.

    python -m bench.plan_check --trace A.csv --trace B.csv        # emulated clusters of 4, 8, 16
    python -m bench.plan_check --trace A.csv --trace B.csv --real # SmolLM2 on this machine's cores

A stretch of each trace, its lengths scaled down, at shares of the goodput that is predicted for it;
live runs go through real servers, schedulers and lanes, predictions do not. Emulated steps are slow
(a tenth of a second), so that the processes of 16 nodes keep up on two cores; pinned real nodes
have a core per thread. Runs whose client was late are shown and not counted.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.deployment import Deployment, parse_deployment
from bench.emulated_model import emulated_model
from bench.goodput import GOODPUT_ATTAINMENT, measure_goodput
from bench.measures import measure
from bench.plan.agreement import Agreement, Figure, agreement_table, error_table, figures
from bench.plan.cluster_model import ClusterModel
from bench.plan.demand import Demand, Recorded
from bench.plan.predict import predict_goodput
from bench.plan.profiles import read_cluster
from bench.plan.simulate import simulate
from bench.report.table import print_table
from bench.run import LoadOptions, Outcome, run_load, warm_up
from bench.slo import Slo, attainment
from bench.targets import OurTarget, pin
from bench.traces import read_trace
from coordinator.supervisor import Cluster

EMULATED = ("4 colocated", "1P3D", "2P2D", "8 colocated", "2P6D", "4P4D", "16 colocated",
            "4P12D", "8P8D")  # fmt: skip
REAL = ("1P1D", "colocated 1x2", "colocated 2x1")
# Of the slow emulated nodes: a decode step of a row is 82 ms, a prompt of 100 tokens 280 ms.
SLOW_PROFILE = {
    "base_ms": 80.0,
    "decode_row_ms": 2.0,
    "prefill_token_ms": 2.0,
    "decode_context_ms": 0.002,
    "prefill_context_ms": 0.0005,
}
SLOW_BUDGET_MS = 250.0
EMULATED_KV_GB = 0.001
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What is asked of every deployment."""

    demands: dict[str, Demand]
    slo: Slo
    shares: tuple[float, ...]
    seed: int
    with_goodput: bool


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_check", description=__doc__)
    add = parser.add_argument
    add("--trace", type=Path, action="append", required=True, help="repeatable")
    add("--real", action="store_true", help="SmolLM2 instead of emulated nodes")
    add("--deployment", action="append", help="repeatable: 2P2D, '4 colocated', 'colocated 1x2'")
    add("--shares", type=float, nargs="+", default=[0.4, 0.7, 0.95], help="of predicted goodput")
    add("--goodput", action="store_true", help="search the live goodput too")
    add("--length-scale", type=float, help="of the traces' lengths; 0.1, with --real 0.2")
    add("--max-input", type=int, default=1500)
    add("--max-output", type=int, default=200)
    add("--requests", type=int, default=150, help="of each run, at least")
    add("--duration-s", type=float, default=60.0, help="of each run, at least")
    add("--ttft-ms", type=float, help="SLO; 3000, with --real 1000")
    add("--tpot-ms", type=float, help="SLO; 150, with --real 50")
    add("--seed", type=int, default=0)
    add("-o", "--output", type=Path, help="JSON of every figure")
    args = parser.parse_args()
    scale = args.length_scale or (0.2 if args.real else 0.1)
    check = Check(
        demands={
            path.stem: Recorded(
                trace=read_trace(path)
                .lengths_scaled(scale)
                .limited(max_input=args.max_input, max_output=args.max_output),
                num_requests=args.requests,
                min_duration_s=args.duration_s,
            )
            for path in args.trace
        },
        slo=Slo(
            ttft_ms=args.ttft_ms or (1000.0 if args.real else 3000.0),
            tpot_ms=args.tpot_ms or (50.0 if args.real else 150.0),
        ),
        shares=tuple(args.shares),
        seed=args.seed,
        with_goodput=args.goodput,
    )
    names = args.deployment or (REAL if args.real else EMULATED)
    runs = asyncio.run(check_all(check, [_deployment(name) for name in names], is_real=args.real))
    print_table(agreement_table([run for run in runs if len(run.figures) > 1]))
    print_table(error_table(runs))
    if args.output is not None:
        args.output.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")


async def check_all(
    check: Check, deployments: list[Deployment], *, is_real: bool
) -> list[Agreement]:
    """One deployment is up at a time."""
    runs: list[Agreement] = []
    for deployment in deployments:
        async with _served(deployment, is_real=is_real) as cluster:
            runs += await _check_one(check, deployment, cluster)
    return runs


async def _check_one(check: Check, deployment: Deployment, cluster: Cluster) -> list[Agreement]:
    model = await _as_planned(deployment, cluster.address)
    target = OurTarget(cluster.address)
    runs: list[Agreement] = []
    try:
        await warm_up(target, seed=check.seed)
        for name, demand in check.demands.items():
            live = _Live(check=check, deployment=deployment, trace=name, demand=demand)
            runs += await live.compare(model, target)
    finally:
        await target.close()
    return runs


@dataclass(slots=True, kw_only=True)
class _Live:
    """Runs of one trace on one deployment; each has prompts of its own."""

    check: Check
    deployment: Deployment
    trace: str
    demand: Demand
    num_runs: int = 0

    async def compare(self, model: ClusterModel, target: OurTarget) -> list[Agreement]:
        seeds = (self.check.seed,)
        goodput = predict_goodput(
            model, self.demand, slo=self.check.slo, start_per_s=1.0, seeds=seeds
        ).mean
        if not goodput:
            print(f"{self.deployment.name}, {self.trace}: no rate is predicted to keep the SLO")
            return []
        runs = [await self._at_rate(model, target, share * goodput) for share in self.check.shares]
        if self.check.with_goodput:
            runs.append(await self._goodput(target, predicted=goodput))
        return runs

    async def _at_rate(self, model: ClusterModel, target: OurTarget, rate: float) -> Agreement:
        workload = self.demand.workload(rate_per_s=rate, seed=self.check.seed)
        planned = simulate(model, workload)
        outcome = await self._run(target, rate)
        slo = self.check.slo
        return self._told(
            rate,
            figures(
                measure(planned.records, wall_s=planned.wall_s),
                outcome.measures,
                attainments=(
                    attainment(planned.records, slo),
                    attainment(outcome.driven.records, slo),
                ),
            ),
            problems=tuple(outcome.validity.reasons),
        )

    async def _goodput(self, target: OurTarget, *, predicted: float) -> Agreement:
        problems: list[str] = []

        async def holds(rate: float) -> bool:
            outcome = await self._run(target, rate)
            problems.extend(outcome.validity.reasons)
            share = attainment(outcome.driven.records, self.check.slo)
            return share >= GOODPUT_ATTAINMENT

        found = await measure_goodput(holds, start_per_s=predicted, tolerance=_TOLERANCE)
        figure = Figure(name="goodput", predicted=predicted, measured=found)
        return self._told(found, (figure,), problems=tuple(problems))

    async def _run(self, target: OurTarget, rate: float) -> Outcome:
        self.num_runs += 1
        workload = self.demand.workload(rate_per_s=rate, seed=self.check.seed)
        return await run_load(
            target, workload, seed=self.check.seed, options=LoadOptions(), number=self.num_runs
        )

    def _told(
        self, rate: float, found: tuple[Figure, ...], *, problems: tuple[str, ...]
    ) -> Agreement:
        agreement = Agreement(
            deployment=self.deployment.name,
            trace=self.trace,
            rate_per_s=rate,
            figures=found,
            problems=problems,
        )
        print(
            f"{agreement.deployment}, {self.trace}, {rate:.3g}/s:",
            ", ".join(_words(figure) for figure in found),
            *problems,
            flush=True,
        )
        return agreement


def _words(figure: Figure) -> str:
    numbers = [figure.predicted, figure.measured]
    shown = " / ".join("-" if number is None else f"{number:.4g}" for number in numbers)
    return f"{figure.name} {shown}" + ("" if figure.error is None else f" ({figure.error:+.1%})")


async def _as_planned(deployment: Deployment, address: str) -> ClusterModel:
    """With the profiles and limits that the running nodes tell."""
    known = await read_cluster(address)
    assert known.kv_bytes_per_token is not None
    return ClusterModel(
        num_prefill=deployment.num_prefill,
        num_decode=deployment.num_decode,
        prefill=known.prefill,
        decode=known.decode,
        block_size=known.block_size,
        kv_bytes_per_token=known.kv_bytes_per_token,
    )


@asynccontextmanager
async def _served(deployment: Deployment, *, is_real: bool) -> AsyncIterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="disagg-plan-check-") as folder:
        model = (
            "smollm2-135m" if is_real else str(emulated_model(Path(folder) / "slow", SLOW_PROFILE))
        )
        options: dict[str, object] = {"threads": deployment.threads}
        if not is_real:
            model = str(emulated_model(Path(folder) / "slow", SLOW_PROFILE))
            options |= {"kv_memory_gb": EMULATED_KV_GB, "step_budget_ms": SLOW_BUDGET_MS}
        async with Cluster(
            model=model,
            num_prefill=deployment.num_prefill,
            num_decode=deployment.num_decode,
            node_options=options,
            log_dir=Path(folder),
        ) as cluster:
            if is_real:
                print(f"{deployment.name}: {pin(cluster, threads=deployment.threads)}")
            yield cluster


def _deployment(name: str) -> Deployment:
    """Also "4 colocated": emulated nodes have no threads to tell apart."""
    number, _, rest = name.partition(" ")
    if rest == "colocated" and number.isdecimal():
        return Deployment(num_prefill=0, num_decode=int(number))
    return parse_deployment(name)


if __name__ == "__main__":
    main()
