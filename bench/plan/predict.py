"""What a cluster would do under a demand: percentiles at a rate, and its goodput.

    predict          at one rate, over several seeds
    predict_goodput  the highest rate at which 90 % of all offered requests meet the SLO, per seed

The seeds' spread is the error band of the demand's chance; how far the model itself is off is
measured by bench/plan_check.py.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.goodput import GOODPUT_ATTAINMENT, highest_rate
from bench.measures import Dist, dist_ms
from bench.plan.cluster_model import ClusterModel
from bench.plan.demand import Demand
from bench.plan.simulate import NodeUse, simulate
from bench.records import OK, REFUSED, RequestRecord
from bench.slo import Slo, attainment

DEFAULT_SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """All seeds together, measured as live runs are. attainments are per seed; busy shares are
    means over the role's nodes, None where there are none."""

    cluster: str
    rate_per_s: float
    num_requests: int
    attainments: tuple[float, ...]
    ttft_ms: Dist | None
    tpot_ms: Dist | None
    prefill_busy: float | None
    decode_busy: float
    num_refused: int
    num_preempted: int

    @property
    def attainment(self) -> float:
        return statistics.fmean(self.attainments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests per second, one per seed."""

    per_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.per_seed)

    @property
    def low(self) -> float:
        return min(self.per_seed)

    @property
    def high(self) -> float:
        return max(self.per_seed)


def predict(
    cluster: ClusterModel,
    demand: Demand,
    *,
    rate_per_s: float,
    slo: Slo,
    seeds: Sequence[int] = DEFAULT_SEEDS,
) -> Prediction:
    outcomes = [
        simulate(cluster, demand.workload(rate_per_s=rate_per_s, seed=seed)) for seed in seeds
    ]
    records = [record for outcome in outcomes for record in outcome.records]
    nodes = [node for outcome in outcomes for node in outcome.nodes]
    return Prediction(
        cluster=cluster.name,
        rate_per_s=rate_per_s,
        num_requests=len(records),
        attainments=tuple(attainment(outcome.records, slo) for outcome in outcomes),
        ttft_ms=dist_ms(record.ttft_s for record in records),
        tpot_ms=dist_ms(record.tpot_s for record in records if record.outcome == OK),
        prefill_busy=_busy(nodes, "prefill"),
        decode_busy=_busy(nodes, "decode") or 0.0,
        num_refused=sum(record.outcome == REFUSED for record in records),
        num_preempted=sum(outcome.num_preempted for outcome in outcomes),
    )


def predict_goodput(
    cluster: ClusterModel,
    demand: Demand,
    *,
    slo: Slo,
    start_per_s: float,
    seeds: Sequence[int] = DEFAULT_SEEDS,
    tolerance: float = 0.02,
) -> Goodput:
    """start_per_s is where the search begins."""
    rates: list[float] = []
    for seed in seeds:
        start = rates[-1] if rates and rates[-1] else start_per_s
        rates.append(
            highest_rate(
                partial(_holds, cluster, demand, seed=seed, slo=slo),
                start_per_s=start,
                tolerance=tolerance,
            )
        )
    return Goodput(per_seed=tuple(rates))


def _holds(cluster: ClusterModel, demand: Demand, rate: float, *, seed: int, slo: Slo) -> bool:
    """Stops as soon as too many have missed."""
    workload = demand.workload(rate_per_s=rate, seed=seed)
    may_miss = (1 - GOODPUT_ATTAINMENT) * len(workload.arrivals)
    num_missed = 0

    def is_lost(record: RequestRecord) -> bool:
        nonlocal num_missed
        num_missed += not slo.is_met(record)
        return num_missed > may_miss

    simulate(cluster, workload, stop_when=is_lost)
    return num_missed <= may_miss


def _busy(nodes: Iterable[NodeUse], role: str) -> float | None:
    shares = [node.busy_share for node in nodes if node.name.startswith(role)]
    return statistics.fmean(shares) if shares else None
