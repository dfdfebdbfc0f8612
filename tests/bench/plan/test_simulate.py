"""Requests through planned clusters: times by hand, and what holds for every workload."""

import pytest
from clusters import cluster, profile, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lengths import Fixed
from bench.plan.cluster_model import ClusterModel, NodeModel
from bench.plan.demand import MadeUp
from bench.plan.overheads import NO_OVERHEADS, Overheads
from bench.plan.simulate import simulate

# A chunk costs 1 ms a token, a decode step 10 ms and 1 ms a row.
BY_HAND = NodeModel(profile=profile(base_ms=10.0, row_ms=1.0, token_ms=1.0), num_blocks=100)


def ms(record):
    return [round(1e3 * at_s, 6) for at_s, _ in record.chunks]


def test_a_request_alone_takes_its_steps_and_its_transfer():
    """32 tokens of 4 bytes at 1 kB/s: 128 bytes, 128 ms, while nothing else happens."""
    (record,) = simulate(
        cluster(1, 1, prefill=BY_HAND, bandwidth_gbs=1e-6), workload((1.0, 32, 3))
    ).records
    assert ms(record) == [1042.0, 1042 + 128 + 11, 1042 + 128 + 22]
    assert record.served_as == "disaggregated"
    assert (record.prefill_node, record.decode_node) == ("prefill-0", "decode-0")
    assert record.transfer_s == pytest.approx(0.128)


def test_overheads_are_paid_once_for_each_message():
    overheads = Overheads(
        request_ms=1.0, call_ms=2.0, answer_ms=4.0, status_ms=0.5, step_ms=8.0, lane_message_ms=16.0
    )
    (record,) = simulate(
        cluster(1, 1, prefill=BY_HAND, overheads=overheads, bandwidth_gbs=1e9),
        workload((0.0, 32, 3)),
    ).records
    # To the coordinator, the decode node, back, the prefill node; a step; back, to the client.
    assert ms(record)[0] == 1 + 3 * 2 + 42 + 2 + 4
    # READY, GRANT, COMMIT on the lane, a step; then steps and what is between them.
    assert ms(record)[1] - ms(record)[0] == 3 * 16 + 11
    assert ms(record)[2] - ms(record)[1] == 8 + 11


def test_a_colocated_node_computes_the_prompt_itself():
    (record,) = simulate(cluster(0, 1, prefill=BY_HAND), workload((0.0, 32, 3))).records
    assert ms(record) == [42, 53, 64]
    assert record.served_as == "local"


def test_one_token_opens_no_decode():
    outcome = simulate(cluster(1, 1, prefill=BY_HAND), workload((0.0, 32, 1)))
    assert ms(outcome.records[0]) == [42]
    assert outcome.records[0].decode_node == ""
    assert outcome.nodes[1].num_steps == 0


def test_half_the_bandwidth_takes_twice_as_long():
    """The handoff of 64 tokens (256 bytes) at 1 and at 0.5 kB/s."""
    gaps = []
    for bandwidth_gbs in (1e-6, 0.5e-6):
        deployment = cluster(1, 1, prefill=BY_HAND, bandwidth_gbs=bandwidth_gbs)
        (record,) = simulate(deployment, workload((0.0, 64, 2))).records
        gaps.append(record.handoff_gap_s)
    assert gaps == pytest.approx([0.256 + 0.011, 0.512 + 0.011])


def test_a_pool_that_is_too_small_preempts_the_younger_and_both_finish():
    """Ten blocks of 16 tokens: two requests of 33 tokens start in three each, and want 9 for
    their 129 tokens."""
    node = NodeModel(profile=BY_HAND.profile, num_blocks=10)
    outcome = simulate(cluster(0, 1, prefill=node), workload((0.0, 33, 96), (0.001, 33, 96)))
    assert outcome.num_preempted >= 1
    assert [record.served_as for record in outcome.records] == ["local", "resumed"]
    assert [record.num_generated for record in outcome.records] == [96, 96]


def test_what_no_node_can_ever_hold_is_refused():
    outcome = simulate(cluster(1, 1, prefill=BY_HAND), workload((0.0, 1600, 10), (0.0, 16, 2)))
    assert [record.outcome for record in outcome.records] == ["refused", "ok"]
    assert outcome.records[0].error == "CONTEXT_TOO_LONG"


def test_more_requests_than_the_line_holds_are_refused():
    """All at once: the line holds 1024, and a node has at most 16 more."""
    outcome = simulate(cluster(1, 1, prefill=BY_HAND), workload(*[(0.0, 16, 2)] * 1200))
    refused = [record for record in outcome.records if record.outcome == "refused"]
    assert 1200 - 1024 - 16 <= len(refused) < 1200 - 1024
    assert {record.error for record in refused} == {"QUEUE_FULL"}


def test_a_deadline_that_the_line_cannot_keep_is_refused():
    """Prompts of 1.5 s: the 81st would be waited for longer than 120 s."""
    outcome = simulate(cluster(1, 1, prefill=BY_HAND), workload(*[(0.0, 1500, 2)] * 100))
    refused = [record for record in outcome.records if record.outcome == "refused"]
    assert len(refused) == 20
    assert {record.error for record in refused} == {"DEADLINE_UNREACHABLE"}


def test_equal_seeds_give_equal_records():
    demand = MadeUp(num_input=Fixed(100), num_output=Fixed(20), num_requests=50)
    first, again, other = (
        simulate(cluster(1, 2, prefill=BY_HAND), demand.workload(rate_per_s=5.0, seed=seed)).records
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_asked_to_stop_it_leaves_the_rest_unfinished():
    outcome = simulate(
        cluster(0, 1, prefill=BY_HAND),
        workload((0.0, 16, 2), (50.0, 16, 2)),
        stop_when=lambda record: True,
    )
    assert [record.outcome for record in outcome.records] == ["ok", "unfinished"]


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0.0, 2.0),
        st.sampled_from((1, 15, 16, 17, 123, 400)),
        st.sampled_from((1, 2, 15, 16, 17, 80)),
    ),
    min_size=1,
    max_size=30,
).map(lambda arrivals: workload(*sorted(arrivals)))


@st.composite
def deployments(draw) -> ClusterModel:
    node = NodeModel(
        profile=profile(base_ms=5.0, row_ms=0.3, token_ms=0.2),
        num_blocks=draw(st.sampled_from((31, 33, 60, 500))),
        max_running=draw(st.sampled_from((1, 4, 64))),
    )
    return cluster(
        draw(st.integers(0, 2)),
        draw(st.integers(1, 2)),
        prefill=node,
        overheads=draw(st.sampled_from((NO_OVERHEADS, Overheads()))),
        bandwidth_gbs=draw(st.sampled_from((1e-5, 1.0))),
        may_be_local=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(deployments(), ARRIVALS)
def test_every_request_ends_once_and_every_block_comes_back(deployment, arrivals):
    outcome = simulate(deployment, arrivals)
    assert [record.index for record in outcome.records] == list(range(len(arrivals.arrivals)))
    for record in outcome.records:
        assert record.outcome == "ok"
        assert record.num_generated == record.num_output
        assert list(record.chunks) == sorted(record.chunks)
        assert record.chunks[0][0] > record.offered_s
    assert all(node.blocks.free == node.blocks.total for node in outcome.nodes)


@settings(max_examples=60, deadline=None)
@given(deployments(), ARRIVALS)
def test_leaping_over_steps_that_are_alike_changes_nothing(deployment, arrivals):
    leaping = simulate(deployment, arrivals)
    stepping = simulate(deployment, arrivals, may_leap=False)
    assert leaping.records == stepping.records
    assert [node.num_steps for node in leaping.nodes] == [node.num_steps for node in stepping.nodes]
