"""What a node tells of itself when it is scraped: blocks, requests, steps.

Nothing is counted here: a scrape reads the state that the node works with, so the numbers are what
admission and scheduling see. Runs on a scraper's thread; everything read is readable from any.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.admission import Admission
from engine.loop import EngineStatus
from kvtransfer.blocks import BlockPool, BlockState
from protos.pd.v1 import cluster_pb2

_STATE_PREFIX = "NODE_STATE_"


class NodeMetrics(Collector):
    """Registers itself, and the process's CPU and memory. engine gives None until weights are
    loaded."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        node_id: str,
        role: cluster_pb2.NodeRole,
        model: str,
        state: Callable[[], cluster_pb2.NodeState],
        pool: BlockPool,
        block_size: int,
        admission: Admission,
        engine: Callable[[], EngineStatus | None],
    ) -> None:
        role_name = cluster_pb2.NodeRole.Name(role).removeprefix("NODE_ROLE_").lower()
        self._info = {"node_id": node_id, "role": role_name, "model": model}
        self._state = state
        self._pool = pool
        self._block_size = block_size
        self._admission = admission
        self._engine = engine
        registry.register(self)
        ProcessCollector(registry=registry)

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("disagg_node", "Who this node is.", value=self._info)
        yield self._states()
        yield self._blocks()
        yield from self._prefix_cache()
        yield GaugeMetricFamily(
            "disagg_node_requests_running",
            "Requests that hold blocks here.",
            value=self._admission.num_running,
        )
        yield GaugeMetricFamily(
            "disagg_node_requests_queued",
            "Requests that wait here for blocks.",
            value=self._admission.num_queued,
        )
        engine = self._engine()
        if engine is not None:
            yield from _engine_families(engine)

    def _states(self) -> Metric:
        family = GaugeMetricFamily(
            "disagg_node_state", "1 for the state that the node is in.", labels=["state"]
        )
        now = self._state()
        for name, value in cluster_pb2.NodeState.items():
            if value != cluster_pb2.NODE_STATE_UNSPECIFIED:
                label = name.removeprefix(_STATE_PREFIX).lower()
                family.add_metric([label], float(value == now))
        return family

    def _blocks(self) -> Metric:
        """One look at the pool, so that the states add up to its size."""
        family = GaugeMetricFamily("disagg_node_kv_blocks", "KV blocks by state.", labels=["state"])
        counts = self._pool.counts()
        for state in BlockState:
            family.add_metric([state.value], getattr(counts, state.value))
        return family

    def _prefix_cache(self) -> Iterator[Metric]:
        counts = self._pool.cache_counts()
        yield CounterMetricFamily(
            "disagg_node_prefix_lookups",
            "Requests whose prefix was looked up here.",
            value=counts.num_lookups,
        )
        yield CounterMetricFamily(
            "disagg_node_prefix_looked_up_tokens",
            "Tokens of theirs that might have been here.",
            value=counts.num_looked_up_blocks * self._block_size,
        )
        yield CounterMetricFamily(
            "disagg_node_prefix_cached_tokens",
            "Tokens of theirs that were here: not computed again, on a decode node not shipped.",
            value=counts.num_hit_blocks * self._block_size,
        )
        yield CounterMetricFamily(
            "disagg_node_prefix_evicted_blocks",
            "Cached blocks that made place.",
            value=counts.num_evicted_blocks,
        )


def _engine_families(engine: EngineStatus) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "disagg_engine_compute_seconds", "Time in steps.", value=engine.compute_s
    )
    yield CounterMetricFamily(
        "disagg_engine_steps", "Steps that have ended.", value=engine.num_steps
    )
    yield GaugeMetricFamily(
        "disagg_engine_queued_tokens",
        "Prompt tokens that are here and not computed.",
        value=engine.num_queued_tokens,
    )
    yield GaugeMetricFamily(
        "disagg_engine_step_age_seconds",
        "How long the step in progress has taken so far; 0 between steps.",
        value=engine.step_age_s or 0.0,
    )
    yield GaugeMetricFamily(
        "disagg_engine_step_predicted_seconds",
        "How long the last step was predicted to take.",
        value=engine.step_predicted_s,
    )
    yield GaugeMetricFamily(
        "disagg_engine_decode_rows",
        "Sequences that drew a token after their first in the last step.",
        value=engine.num_decoding,
    )
