"""disagg bench compare: a split against colocated serving and other servers, on the same cores.

    phase "aa": the split and a second instance of it, in turns         --> the band
    phase "ab": the split, its colocated baselines, the peers, in turns --> findings --> verdict

Drift meets all alike, because they take turns (bench/rounds.py) and are frozen otherwise
(bench/contender.py). measure says what a run is; bench/comparison.py concludes.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.comparison import Comparison, conclude
from bench.contender import Contender, Outside, Served, is_emulated
from bench.deployment import Deployment, baselines
from bench.rounds import Measure, Tell, run_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A running OpenAI-compatible server, and the processes to freeze with their children."""

    url: str
    model: str
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan:
    """What is compared. kv_memory_gb is each deployment's in all; slo is for the words."""

    deployment: Deployment
    model: str
    kv_memory_gb: float
    num_rounds: int
    slo: str
    peers: tuple[Peer, ...] = ()
    seed: int = 0


async def compare(
    plan: ComparePlan, folder: Path, *, measure: Measure, tell: Tell = lambda run: None
) -> Comparison:
    """Runs all rounds; every run is in folder when it has ended. Raises ChildFailed."""
    colocated = baselines(plan.deployment, is_emulated=is_emulated(plan.model))
    in_turns = partial(
        run_rounds,
        num_rounds=plan.num_rounds,
        seed=plan.seed,
        folder=folder,
        measure=measure,
        tell=tell,
    )
    async with AsyncExitStack() as stack:
        peers: list[Contender] = [
            await stack.enter_async_context(Outside(peer.url, model=peer.model, pids=peer.pids))
            for peer in plan.peers
        ]
        candidate = await stack.enter_async_context(_served(plan, plan.deployment, folder))
        again = f"{plan.deployment.name} again"
        async with _served(plan, plan.deployment, folder, name=again) as twin:
            runs = await in_turns([candidate, twin], phase="aa")
        rivals: list[Contender] = [
            await stack.enter_async_context(_served(plan, deployment, folder))
            for deployment in colocated
        ]
        runs += await in_turns([candidate, *rivals, *peers], phase="ab")
    return conclude(
        runs,
        candidate=candidate.name,
        colocated=[deployment.name for deployment in colocated],
        slo=plan.slo,
        seed=plan.seed,
    )


def _served(plan: ComparePlan, deployment: Deployment, folder: Path, *, name: str = "") -> Served:
    name = name or deployment.name
    return Served(
        deployment,
        model=plan.model,
        kv_memory_gb=plan.kv_memory_gb,
        log_dir=folder / "logs" / name.replace(" ", "-"),
        name=name,
    )
