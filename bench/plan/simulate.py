"""A workload on a planned cluster, from the first arrival until every request has ended."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from bench.plan.clock import Clock
from bench.plan.cluster_model import ClusterModel, NodeModel
from bench.plan.front import SimulatedFront
from bench.plan.request import PlannedRequest
from bench.records import RequestRecord
from bench.workload import Workload
from kvtransfer.blocks import BlockCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """What one node did: busy_share is time in steps, of the whole run; blocks are at its end."""

    name: str
    busy_share: float
    num_steps: int
    num_preempted: int
    blocks: BlockCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """records in order of arrival, as of a live run. num_refused_by_nodes counts reservations that
    a decode node had no room for; their requests waited on."""

    records: list[RequestRecord]
    nodes: list[NodeUse]
    wall_s: float
    num_refused_by_nodes: int

    @property
    def num_preempted(self) -> int:
        return sum(node.num_preempted for node in self.nodes)


def simulate(
    cluster: ClusterModel,
    workload: Workload,
    *,
    stop_when: Callable[[RequestRecord], bool] | None = None,
    may_leap: bool = True,
) -> Outcome:
    """The same cluster and workload give the same outcome.

    stop_when is asked at each request's end; once it is true, others stay unfinished.
    """
    clock = Clock()
    is_stopped = False

    def ended(request: PlannedRequest) -> None:
        nonlocal is_stopped
        is_stopped = is_stopped or (stop_when is not None and stop_when(request.record()))

    front = SimulatedFront(
        clock, _without_idle_blocks(cluster, workload), on_end=ended, may_leap=may_leap
    )
    answer_s, request_s = cluster.overheads.answer_ms / 1e3, cluster.overheads.request_ms / 1e3
    requests = [
        PlannedRequest(index=index, arrival=arrival, answer_s=answer_s)
        for index, arrival in enumerate(workload.arrivals)
    ]
    for request in requests:
        clock.at(request.arrival.at_s + request_s, partial(front.arrive, request))

    def goes_on() -> bool:
        return not is_stopped and (front.num_ended < len(requests) or not front.is_idle)

    clock.run(while_true=goes_on)
    wall_s = clock.now_s
    return Outcome(
        records=[request.record() for request in requests],
        nodes=[
            NodeUse(
                name=name,
                busy_share=node.loop.counts.busy_ms / 1e3 / wall_s if wall_s else 0.0,
                num_steps=node.loop.counts.num_steps,
                num_preempted=node.loop.counts.num_preempted,
                blocks=node.pool.counts(),
            )
            for name, node in front.nodes.items()
        ],
        wall_s=wall_s,
        num_refused_by_nodes=front.num_refused_by_nodes,
    )


def _without_idle_blocks(cluster: ClusterModel, workload: Workload) -> ClusterModel:
    """Blocks that the node's requests could never use, all at their longest, are left out: large
    pools take long to make, and no decision depends on them."""
    longest = max((one.num_input + one.num_output for one in workload.arrivals), default=0)

    def without(node: NodeModel) -> NodeModel:
        # With the block that is left over for each request beside it, and one more.
        most = node.max_running * (cluster.layout.blocks_for(longest + 1) + 2)
        max_model_len = min(node.max_model_len, node.num_blocks * cluster.block_size - 1)
        return replace(node, num_blocks=min(node.num_blocks, most), max_model_len=max_model_len)

    return replace(cluster, prefill=without(cluster.prefill), decode=without(cluster.decode))
