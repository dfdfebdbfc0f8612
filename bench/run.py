"""A whole run: warm-up, load, self-check, figures; and the search for goodput, run by run.

    Recipe --run_load--> Outcome --bench/run_files.py--> requests.jsonl, summary.json
    rates  --find_goodput, a run each--> Goodput

Every run has prompts of its own, or a prefix cache would answer; rates of one search have the same
lengths, at times that are as far apart as the rate says.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from bench.driver import DEFAULT_DRAIN_S, Driven, Watcher, drive_closed, drive_open
from bench.goodput import GOODPUT_ATTAINMENT, Search
from bench.measures import Measures, measure
from bench.node_use import NodeUse
from bench.prompts import Prompted, Prompts, with_prompts
from bench.recipe import Recipe
from bench.records import OK
from bench.self_check import Validity, Watch
from bench.slo import Slo, attainment
from bench.targets import OurTarget, Target
from bench.workload import Arrival, Workload

_WARM_UP = Arrival(at_s=0.0, num_input=64, num_output=8)
_NUM_WARM_UP = 4
# Prompts of a seed's runs: the warm-up's, then those of each rate of a search.
_PROMPT_SEEDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """concurrency: closed loop, with the workload's lengths; None: open loop at its times."""

    concurrency: int | None = None
    duration_s: float | None = None
    drain_s: float = DEFAULT_DRAIN_S
    watch: Watcher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one run. nodes is empty for a server that is not ours."""

    workload: Workload
    driven: Driven
    measures: Measures
    validity: Validity
    nodes: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """rate_per_s is the highest that held; tried is (offered rate, attainment), in order; problems
    are what made any of the runs invalid."""

    rate_per_s: float
    tried: tuple[tuple[float, float], ...]
    problems: tuple[str, ...]
    best: Outcome


async def run_load(
    target: Target, workload: Workload, *, seed: int, options: LoadOptions, number: int = 0
) -> Outcome:
    """The number-th run of a seed: each has other prompts."""
    prompt_seed = _PROMPT_SEEDS * seed + number + 1
    requests = with_prompts(workload, seed=prompt_seed, vocab=await target.vocab())
    async with AsyncExitStack() as stack:
        use = None
        if isinstance(target, OurTarget):
            use = await stack.enter_async_context(NodeUse(target.client, metrics=target.metrics))
        watch = await stack.enter_async_context(Watch())
        driven = await _drive(target, requests, options)
    return Outcome(
        workload=workload,
        driven=driven,
        measures=measure(driven.records, wall_s=driven.wall_s),
        validity=watch.check(driven.records),
        nodes={} if use is None else use.shares(),
    )


async def find_goodput(
    target: Target,
    recipe: Recipe,
    *,
    slo: Slo,
    start_per_s: float,
    options: LoadOptions,
    tell: Callable[[float, float], None] = lambda rate, share: None,
) -> Goodput:
    """Tries rates until the highest with GOODPUT_ATTAINMENT is known; tell hears of each."""
    search = Search(start_per_s=start_per_s)
    recipe = recipe.for_search(ttft_ms=slo.ttft_ms)
    tried: list[tuple[float, float]] = []
    problems: list[str] = []
    held: Outcome | None = None
    last: Outcome | None = None
    while (rate := search.rate) is not None:
        workload = recipe.at_rate(rate).workload()
        last = await run_load(
            target, workload, seed=recipe.seed, options=options, number=len(tried)
        )
        share = attainment(last.driven.records, slo)
        tried.append((rate, share))
        problems += [f"at {rate:.3g} requests/s {why}" for why in last.validity.reasons]
        tell(rate, share)
        holds = share >= GOODPUT_ATTAINMENT
        held = last if holds else held
        search.learn(holds)
    best = held or last
    assert best is not None, "a search tries one rate at least"
    return Goodput(rate_per_s=search.found, tried=tuple(tried), problems=tuple(problems), best=best)


async def warm_up(target: Target, *, seed: int) -> None:
    """The first requests fetch pages and build lanes. Raises ConnectionError when one fails,
    because all that follow would."""
    prompts = Prompts(seed=_PROMPT_SEEDS * seed, vocab=await target.vocab())
    endings = await asyncio.gather(
        *(
            target.ask(prompts.of(index, _WARM_UP), _WARM_UP.num_output, [])
            for index in range(_NUM_WARM_UP)
        )
    )
    errors = [ending.error for ending in endings if ending.outcome != OK]
    if errors:
        raise ConnectionError(f"the warm-up failed: {errors[0]}")


def check_fits(workload: Workload, *, max_model_len: int | None) -> None:
    """Raises ValueError where the server would refuse requests for their length."""
    if max_model_len is None:
        return
    too_long = [a for a in workload.arrivals if a.num_input + a.num_output > max_model_len]
    if too_long:
        raise ValueError(
            f"{len(too_long)} of {len(workload.arrivals)} requests are longer than the "
            f"{max_model_len} tokens that the model takes: scale lengths or limit them"
        )


async def _drive(target: Target, requests: Sequence[Prompted], options: LoadOptions) -> Driven:
    if options.concurrency is None:
        return await drive_open(target, requests, drain_s=options.drain_s, watch=options.watch)
    return await drive_closed(
        target,
        requests,
        concurrency=options.concurrency,
        duration_s=options.duration_s,
        drain_s=options.drain_s,
        watch=options.watch,
    )
