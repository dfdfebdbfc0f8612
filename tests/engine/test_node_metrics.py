"""A scrape of a node reads the state that the node works with."""

from prometheus_client import CollectorRegistry

from engine.admission import Admission
from engine.cost_model import CostProfile
from engine.loop import EngineStatus
from engine.node_metrics import NodeMetrics
from kvtransfer.blocks import BlockPool
from protos.pd.v1 import cluster_pb2
from tests.scrape import samples


def test_blocks_are_told_by_state_and_add_up():
    registry = CollectorRegistry()
    pool = BlockPool(10)
    node_metrics(registry, pool=pool)
    lease = pool.reserve(6)
    pool.begin_write(lease, lease.block_ids[:3], writer="w")
    pool.end_write(lease.block_ids[:1], writer="w")
    blocks = {k[1]: v for k, v in samples(registry).items() if k[0] == "disagg_node_kv_blocks"}
    assert {name: count for name, count in blocks.items() if count} == {
        "free": 4,
        "reserved": 3,
        "writing": 2,
        "sealed": 1,
    }


def test_requests_state_and_identity():
    registry = CollectorRegistry()
    pool = BlockPool(4)
    admission = Admission(pool, max_running=2, on_change=lambda: None)
    node_metrics(registry, pool=pool, admission=admission)
    with admission.reserve(1):
        got = samples(registry)
    assert got[("disagg_node_requests_running",)] == 1
    assert got[("disagg_node_requests_queued",)] == 0
    assert got[("disagg_node_info", "m", "decode-7", "decode")] == 1
    states = {key[1]: value for key, value in got.items() if key[0] == "disagg_node_state"}
    assert states == {"starting": 0, "serving": 1, "draining": 0}


def test_the_engine_is_told_of_once_it_is_there():
    registry = CollectorRegistry()
    engine: list[EngineStatus | None] = [None]
    node_metrics(registry, engine=lambda: engine[0])
    assert not any(key[0].startswith("disagg_engine") for key in samples(registry))
    engine[0] = EngineStatus(
        num_queued_tokens=300,
        num_steps=12,
        compute_s=1.5,
        step_age_s=0.5,
        step_predicted_s=0.25,
        num_decoding=3,
        decode_context=90,
        profile=CostProfile(
            base_ms=1.0,
            decode_row_ms=1.0,
            prefill_token_ms=1.0,
            decode_context_ms=0.0,
            prefill_context_ms=0.0,
        ),
    )
    got = samples(registry)
    assert got[("disagg_engine_steps_total",)] == 12
    assert got[("disagg_engine_compute_seconds_total",)] == 1.5
    assert got[("disagg_engine_queued_tokens",)] == 300
    assert got[("disagg_engine_step_age_seconds",)] == 0.5
    assert got[("disagg_engine_step_predicted_seconds",)] == 0.25
    assert got[("disagg_engine_decode_rows",)] == 3
    assert got[("process_cpu_seconds_total",)] > 0


def node_metrics(registry, *, pool=None, admission=None, engine=lambda: None) -> None:
    pool = pool or BlockPool(1)
    NodeMetrics(
        registry,
        node_id="decode-7",
        role=cluster_pb2.NODE_ROLE_DECODE,
        model="m",
        state=lambda: cluster_pb2.NODE_STATE_SERVING,
        pool=pool,
        block_size=16,
        admission=admission or Admission(pool, max_running=1, on_change=lambda: None),
        engine=engine,
    )
