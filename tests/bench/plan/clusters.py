"""Small clusters and workloads that the planner's tests share."""

from bench.plan.cluster_model import ClusterModel, NodeModel
from bench.plan.overheads import NO_OVERHEADS, Overheads
from bench.workload import Arrival, Workload
from engine.cost_model import CostProfile


def profile(*, base_ms: float = 0.0, row_ms: float = 0.0, token_ms: float = 0.0) -> CostProfile:
    """Steps whose time does not depend on context."""
    return CostProfile(
        base_ms=base_ms,
        decode_row_ms=row_ms,
        prefill_token_ms=token_ms,
        decode_context_ms=0.0,
        prefill_context_ms=0.0,
    )


def cluster(
    num_prefill: int,
    num_decode: int,
    *,
    prefill: NodeModel,
    decode: NodeModel | None = None,
    overheads: Overheads = NO_OVERHEADS,
    bandwidth_gbs: float = 1000.0,
    may_be_local: bool = False,
) -> ClusterModel:
    return ClusterModel(
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill=prefill,
        decode=decode or prefill,
        overheads=overheads,
        bandwidth_gbs=bandwidth_gbs,
        may_be_local=may_be_local,
    )


def workload(*arrivals: tuple[float, int, int]) -> Workload:
    """Of (at_s, num_input, num_output)."""
    return Workload(
        name="by hand",
        arrivals=tuple(
            Arrival(at_s=at_s, num_input=num_input, num_output=num_output)
            for at_s, num_input, num_output in arrivals
        ),
    )
