"""What one request adds to the metrics, for moments that are given by hand."""

import pytest
from prometheus_client import CollectorRegistry

from coordinator.answer import Marks
from coordinator.metrics import GenerationMetrics, RequestMeter
from coordinator.registry import NodeEntry, Registry
from coordinator.timeline import Timeline
from kvtransfer.layout import KvLayout
from kvtransfer.messages import NodeKey
from protos.errors import Reason, ServingError
from protos.pd.v1 import generation_pb2
from tests.scrape import samples

LAYOUT = KvLayout(
    model="m",
    model_digest="d",
    dtype="float32",
    block_size=16,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


def world(waiting=()) -> tuple[CollectorRegistry, Registry, GenerationMetrics]:
    registry, nodes = CollectorRegistry(), Registry()
    return registry, nodes, GenerationMetrics(registry, nodes=nodes, queue=waiting)


def tell(meter: RequestMeter, marks: Marks, *, at: float, num_tokens: int, choice: int = 0) -> None:
    """A delta that is taken in at that time."""
    marks.told(num_tokens, now=at)
    delta = generation_pb2.GenerationDelta(choice=choice, token_ids=[7] * num_tokens)
    meter.told(generation_pb2.GenerateResponse(delta=delta))


def finish(meter: RequestMeter, served_as: generation_pb2.ServedAs) -> None:
    finished = generation_pb2.GenerationFinished(served_as=served_as)
    meter.told(generation_pb2.GenerateResponse(finished=finished))


def test_a_disaggregated_request_counts_its_tokens_and_its_times():
    registry, _, metrics = world()
    marks, timeline = Marks(arrived=100.0), Timeline("r")
    with metrics.request(marks) as meter:
        meter.accepted(num_prompt_tokens=30, timeline=timeline)
        assert samples(registry)[("disagg_requests_in_flight",)] == 1
        timeline.add("paired", reason="paired")
        marks.paired = 101.0
        tell(meter, marks, at=103.0, num_tokens=1)
        marks.sealed = 103.5
        marks.second_token = 104.0
        tell(meter, marks, at=104.0, num_tokens=3)
        finish(meter, generation_pb2.SERVED_AS_DISAGGREGATED)
    got = samples(registry)
    assert got[("disagg_requests_total", "OK", "disaggregated")] == 1
    assert got[("disagg_requests_in_flight",)] == 0
    assert got[("disagg_prompt_tokens_total",)] == 30
    assert got[("disagg_generated_tokens_total",)] == 4
    assert got[("disagg_pairings_total", "paired")] == 1
    assert got[("disagg_ttft_seconds_sum",)] == 3.0
    assert got[("disagg_queue_seconds_sum",)] == 1.0
    assert got[("disagg_handoff_gap_seconds_sum",)] == 1.0
    assert got[("disagg_e2e_seconds_sum",)] == 4.0
    # Four tokens have three gaps: 1 s, and two of none.
    assert got[("disagg_itl_seconds_count",)] == 3
    assert got[("disagg_itl_seconds_sum",)] == 1.0


def test_cache_hits_are_counted_by_side():
    registry, _, metrics = world()
    timeline = Timeline("r")
    with metrics.request(Marks(arrived=0.0)) as meter:
        meter.accepted(num_prompt_tokens=90, timeline=timeline)
        timeline.add("cached", side="decode", tokens=16, predicted=0)
        timeline.add("cached", side="prefill", tokens=64, predicted=80)
        timeline.add("cached", side="prefill", tokens=16, predicted=16)
    got = samples(registry)
    assert got[("disagg_cached_tokens_total", "prefill")] == 80
    assert got[("disagg_cached_tokens_total", "decode")] == 16


def test_gaps_are_those_of_one_choice():
    registry, _, metrics = world()
    marks = Marks(arrived=0.0)
    with metrics.request(marks) as meter:
        for at, choice in ((1.0, 0), (1.5, 1), (3.0, 0), (3.25, 1)):
            tell(meter, marks, at=at, num_tokens=1, choice=choice)
    got = samples(registry)
    assert got[("disagg_ttft_seconds_count",)] == 1
    assert got[("disagg_itl_seconds_count",)] == 2
    assert got[("disagg_itl_seconds_sum",)] == 2.0 + 1.75


def test_a_local_request_has_no_handoff_gap():
    registry, _, metrics = world()
    marks = Marks(arrived=0.0)
    with metrics.request(marks) as meter:
        tell(meter, marks, at=1.0, num_tokens=2)
        finish(meter, generation_pb2.SERVED_AS_LOCAL)
    got = samples(registry)
    assert got[("disagg_handoff_gap_seconds_count",)] == 0
    assert got[("disagg_requests_total", "OK", "local")] == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ServingError(Reason.QUEUE_FULL, "full"), "QUEUE_FULL"),
        (RuntimeError("a bug"), "INTERNAL"),
        (GeneratorExit(), "CANCELLED"),
    ],
)
def test_a_request_that_fails_is_counted_by_what_ended_it_and_has_no_e2e_time(error, outcome):
    registry, _, metrics = world()
    marks = Marks(arrived=0.0)
    with pytest.raises(type(error)), metrics.request(marks) as meter:
        tell(meter, marks, at=1.0, num_tokens=1)
        raise error
    got = samples(registry)
    assert got[("disagg_requests_total", outcome, "none")] == 1
    assert got[("disagg_e2e_seconds_count",)] == 0
    assert got[("disagg_requests_in_flight",)] == 0


def test_a_client_that_leaves_after_the_last_message_was_served():
    registry, _, metrics = world()
    with pytest.raises(GeneratorExit), metrics.request(Marks(arrived=0.0)) as meter:
        finish(meter, generation_pb2.SERVED_AS_LOCAL)
        raise GeneratorExit
    assert samples(registry)[("disagg_requests_total", "OK", "local")] == 1


def test_only_an_attempt_that_is_followed_by_another_pairing_is_a_recovery():
    registry, _, metrics = world()
    timeline = Timeline("r")
    with metrics.request(Marks(arrived=0.0)) as meter:
        meter.accepted(num_prompt_tokens=1, timeline=timeline)
        timeline.add("paired", reason="paired")
        timeline.add("broken", reason="NODE_LOST", error="")
        timeline.add("paired", reason="no prefill node")
        timeline.add("refused", node="d")
        timeline.add("paired", reason="no prefill node")
        timeline.add("broken", reason="LANE_LOST", error="")
    got = samples(registry)
    recoveries = {key[1:]: value for key, value in got.items() if key[0].startswith("disagg_reco")}
    assert recoveries == {("NODE_LOST",): 1}
    assert got[("disagg_pairings_total", "paired")] == 1
    assert got[("disagg_pairings_total", "no prefill node")] == 2


def test_nodes_and_the_line_are_read_at_the_scrape():
    waiting: list[int] = []
    registry, nodes, _ = world(waiting)
    assert not any(key[0] == "disagg_nodes" for key in samples(registry))
    for name, is_prefill, state in (
        ("p0", True, {"is_serving": True}),
        ("d0", False, {"is_serving": True}),
        ("d1", False, {"is_serving": True}),
        ("d2", False, {}),
        ("d3", False, {"is_serving": True, "step_age_s": 60.0, "step_predicted_s": 0.1}),
        ("d4", False, {"is_draining": True}),
    ):
        nodes.register(
            NodeEntry(
                key=NodeKey(node_id=name, incarnation=1),
                is_prefill=is_prefill,
                address="h:1",
                layout=LAYOUT,
                num_blocks=1,
                max_model_len=1,
                max_running=1,
                **state,
            )
        )
    waiting += [1, 2, 3]
    got = samples(registry)
    assert got[("disagg_queue_length",)] == 3
    assert {key[1:]: value for key, value in got.items() if key[0] == "disagg_nodes"} == {
        ("prefill", "serving"): 1,
        ("decode", "serving"): 2,
        ("decode", "starting"): 1,
        ("decode", "stuck"): 1,
        ("decode", "draining"): 1,
    }
