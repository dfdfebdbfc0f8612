"""One measured run of a contender that is awake: warm-up, load, requests on disk, figures.

    LoadRun      recipe at its rate --run_load--> FOLDER/requests/LABEL.jsonl, all figures
    GoodputRun   recipe at rates to be found --find_goodput--> the highest that keeps the SLO, and
                 the figures at that one

All contenders of a round get the same requests: the recipe's, with the round's seed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.contender import Contender
from bench.figures import GOODPUT, figures_of
from bench.recipe import Recipe
from bench.records import RequestRecord, write_jsonl
from bench.rounds import Measured
from bench.run import LoadOptions, Outcome, check_fits, find_goodput, run_load, warm_up
from bench.slo import Slo, attainment


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """Measures a contender at the recipe's own rate."""

    recipe: Recipe
    slo: Slo
    folder: Path
    options: LoadOptions = field(default_factory=LoadOptions)

    async def __call__(self, contender: Contender, label: str, seed: int) -> Measured:
        workload = replace(self.recipe, seed=seed).workload()
        target = contender.open_target()
        try:
            check_fits(workload, max_model_len=await target.max_model_len())
            await warm_up(target, seed=seed)
            outcome = await run_load(target, workload, seed=seed, options=self.options)
        finally:
            await target.close()
        return measured_of(outcome, self.slo, folder=self.folder, label=label)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputRun:
    """Measures a contender's goodput, in requests/s, by trying rates from start_per_s on."""

    recipe: Recipe
    slo: Slo
    folder: Path
    start_per_s: float
    options: LoadOptions = field(default_factory=LoadOptions)

    async def __call__(self, contender: Contender, label: str, seed: int) -> Measured:
        recipe = replace(self.recipe, seed=seed)
        target = contender.open_target()
        try:
            await warm_up(target, seed=seed)
            found = await find_goodput(
                target, recipe, slo=self.slo, start_per_s=self.start_per_s, options=self.options
            )
        finally:
            await target.close()
        measured = measured_of(found.best, self.slo, folder=self.folder, label=label)
        figures = {GOODPUT.name: found.rate_per_s, **measured.figures}
        return replace(measured, figures=figures)


def measured_of(outcome: Outcome, slo: Slo, *, folder: Path, label: str) -> Measured:
    kept = attainment(outcome.driven.records, slo)
    return Measured(
        figures=figures_of(outcome.measures, attainment=kept),
        records=keep_requests(outcome.driven.records, folder, label),
        problems=outcome.validity.reasons,
    )


def keep_requests(records: Sequence[RequestRecord], folder: Path, label: str) -> str:
    """Writes a run's requests to a file of their own; returns its path within folder."""
    name = f"requests/{re.sub(r'[^A-Za-z0-9.-]+', '-', label)}.jsonl"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / name, records)
    return name
