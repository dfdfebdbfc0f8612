"""Every split of N machines, predicted side by side, on as many cores as there are.

Each deployment is a task of its own for a process of its own: simulations share nothing.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from bench.plan.advice import Outlook
from bench.plan.cluster_model import ClusterModel
from bench.plan.demand import Demand
from bench.plan.predict import DEFAULT_SEEDS, predict, predict_goodput
from bench.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """rate_per_s: also what happens at this one; None: only how far it goes."""

    demand: Demand
    slo: Slo
    rate_per_s: float | None = None
    seeds: tuple[int, ...] = DEFAULT_SEEDS


def every_split(cluster: ClusterModel, *, num_nodes: int) -> list[ClusterModel]:
    """Colocated first, then from one prefill node to one decode node. What the nodes of a
    colocated cluster are is what its decode nodes are."""
    return [
        replace(cluster, num_prefill=num_prefill, num_decode=num_nodes - num_prefill)
        for num_prefill in range(num_nodes)
    ]


def outlook(question: Question, cluster: ClusterModel) -> Outlook:
    start_per_s = question.rate_per_s or float(cluster.num_nodes)
    return Outlook(
        name=cluster.name,
        num_nodes=cluster.num_nodes,
        is_colocated=not cluster.num_prefill,
        goodput=predict_goodput(
            cluster,
            question.demand,
            slo=question.slo,
            start_per_s=start_per_s,
            seeds=question.seeds,
        ),
        at_rate=None
        if question.rate_per_s is None
        else predict(
            cluster,
            question.demand,
            rate_per_s=question.rate_per_s,
            slo=question.slo,
            seeds=question.seeds,
        ),
    )


def outlooks(
    question: Question,
    clusters: Sequence[ClusterModel],
    *,
    tell: Callable[[int], None] = lambda num_done: None,
) -> list[Outlook]:
    """In the order of clusters; tell is told how many are done."""
    # Not forked: what the calling process has open stays its own.
    context = multiprocessing.get_context("spawn")
    num_workers = min(len(clusters), os.cpu_count() or 1)
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        found = []
        for one in pool.map(partial(outlook, question), clusters):
            found.append(one)
            tell(len(found))
        return found
