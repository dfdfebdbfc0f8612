"""Pairing by table: which nodes, and why, from what they have told."""

from dataclasses import replace

import pytest

from coordinator.pairing import Need, choose_pair
from coordinator.registry import NodeEntry
from engine.cost_model import CostProfile
from kvtransfer.layout import KvLayout
from kvtransfer.messages import NodeKey
from protos.errors import Reason, ServingError

LAYOUT = KvLayout(
    model="m",
    model_digest="00",
    dtype="float32",
    block_size=10,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
# 1 ms per prompt token, 2 ms per decode row.
PROFILE = CostProfile(
    base_ms=10.0,
    decode_row_ms=2.0,
    prefill_token_ms=1.0,
    decode_context_ms=0.0,
    prefill_context_ms=0.0,
)
# 4 blocks now: 30 tokens and the next one.
NEED = Need(num_prompt_tokens=30, max_num_tokens=50)


def node(name: str, **state: object) -> NodeEntry:
    values = {
        "layout": LAYOUT,
        "num_blocks": 100,
        "max_model_len": 999,
        "max_running": 8,
        "is_serving": True,
        "available_blocks": 100,
        "profile": PROFILE,
        **state,
    }
    return NodeEntry(
        key=NodeKey(node_id=name, incarnation=1),
        is_prefill=name.startswith("p"),
        address="127.0.0.1:1",
        **values,
    )


def chosen(*nodes: NodeEntry, need: Need = NEED, **options: bool):
    pair = choose_pair(nodes, need, **options)
    if pair is None:
        return None
    names = [n.key.node_id if n is not None else None for n in (pair.prefill, pair.decode)]
    return (*names, pair.reason)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("p0"), node("d0")], ("p0", "d0", "paired")),
        ([node("d0")], (None, "d0", "no prefill node")),
        ([node("p0", is_serving=False), node("d0")], (None, "d0", "no prefill node")),
        ([node("p0", is_avoided=True), node("d0")], (None, "d0", "no prefill node")),
        # The lowest predicted ITL, then most blocks.
        ([node("p0"), node("d0", num_decoding=3), node("d1", num_decoding=2)], ("p0", "d1")),
        ([node("p0"), node("d0", num_decoding=3), node("d1", num_held=4)], ("p0", "d0")),
        ([node("p0"), node("d0", available_blocks=60), node("d1")], ("p0", "d1")),
        # Room: 4 blocks, and one for each request that runs.
        ([node("p0"), node("d0", available_blocks=3)], None),
        ([node("p0"), node("d0", available_blocks=4)], ("p0", "d0")),
        ([node("p0"), node("d0", available_blocks=5, num_running=2)], None),
        ([node("p0"), node("d0", available_blocks=6, num_running=2)], ("p0", "d0")),
        ([node("p0"), node("d0", available_blocks=9, held_blocks=6)], None),
        ([node("p0"), node("d0", num_running=8)], None),
        ([node("p0"), node("d0", refused_seq=0)], None),
        ([node("p0"), node("d0", refused_seq=0, status_seq=1)], ("p0", "d0")),
        # Stuck: 5 s is the floor, 20 times the prediction the limit.
        ([node("p0"), node("d0", step_age_s=5.1), node("d1", num_decoding=9)], ("p0", "d1")),
        ([node("p0"), node("d0", step_age_s=5.1, step_predicted_s=0.3)], ("p0", "d0")),
        # The earliest first token; what was sent and not told of counts too.
        ([node("p0", queued_tokens=90), node("p1", unseen_tokens=80), node("d0")], ("p1", "d0")),
        # Busy prefill nodes get the next prompt when less than 100 ms are ahead.
        (
            [node("p0", queued_tokens=100, num_outstanding=1), node("d0", num_decoding=20)],
            ("p0", "d0"),
        ),
        ([node("p0", queued_tokens=5000, num_outstanding=16), node("d0", num_decoding=20)], None),
        # Other block sizes and orders are translated; other models are not.
        ([node("p0", layout=replace(LAYOUT, block_size=4)), node("d0")], ("p0", "d0")),
        (
            [node("p0"), node("d0", layout=replace(LAYOUT, dtype="bfloat16")), node("d1")],
            ("p0", "d1"),
        ),
    ],
)
def test_a_pair_is_chosen_by_what_the_nodes_have_told(nodes, expected):
    got = chosen(*nodes, may_be_local=False)
    assert (got and got[: len(expected)]) == expected


def test_a_short_prompt_goes_to_a_busy_prefill_node_that_lets_it_pass():
    busy = node("p0", queued_tokens=500, num_outstanding=1)
    short = Need(num_prompt_tokens=30, max_num_tokens=50)
    long = Need(num_prompt_tokens=300, max_num_tokens=350)
    assert chosen(busy, node("d0"), need=short, may_be_local=False) == ("p0", "d0", "paired")
    assert chosen(busy, node("d0"), need=long, may_be_local=False) is None


def test_a_short_prompt_is_local_when_prefill_is_busy_and_the_step_budget_holds_it():
    # 30 ms of prompt beside a decode step of 14 ms fit 50 ms; the prefill node is 500 ms behind.
    busy, decode = node("p0", queued_tokens=500, num_outstanding=1), node("d0", num_decoding=2)
    assert chosen(busy, decode) == (None, "d0", "short prompt, prefill busy")
    assert chosen(node("p0"), decode) == ("p0", "d0", "paired")
    crowded = node("d0", num_decoding=6)
    assert chosen(busy, crowded) == ("p0", "d0", "paired")


def test_a_saturated_prefill_pool_is_passed_by_only_when_that_is_sooner():
    # Full: 16 outstanding. Locally 300 ms of prompt have all of the node, or a tenth.
    full = node("p0", queued_tokens=2000, num_outstanding=16)
    need = Need(num_prompt_tokens=300, max_num_tokens=350)
    assert chosen(full, node("d0"), need=need) == (None, "d0", "prefill saturated")
    assert chosen(full, node("d0", num_decoding=20), need=need) is None
    assert chosen(full, node("d0"), need=need, may_be_local=False) is None


def test_one_token_needs_no_decode_node_where_there_are_prefill_nodes():
    need = Need(num_prompt_tokens=30, max_num_tokens=31)
    full = node("d0", available_blocks=0)
    assert chosen(node("p0"), full, need=need) == ("p0", None, "one token")
    assert chosen(node("d0"), need=need) == (None, "d0", "no prefill node")
    two = replace(need, num_choices=2)
    assert chosen(node("p0"), node("d0"), need=two) == ("p0", "d0", "paired")


@pytest.mark.parametrize(
    ("nodes", "need", "reason", "metadata"),
    [
        ([node("p0")], NEED, Reason.NO_NODES, {}),
        ([node("d0", is_serving=False)], NEED, Reason.NO_NODES, {}),
        ([node("d0", max_model_len=49)], NEED, Reason.CONTEXT_TOO_LONG, {"limit": "49"}),
        (
            [node("p0", layout=replace(LAYOUT, dtype="bfloat16")), node("d0")],
            NEED,
            Reason.LAYOUT_MISMATCH,
            {"field": "dtype"},
        ),
        # 3 blocks of prompt, and 2 + 1 for each choice.
        (
            [node("d0", num_blocks=11)],
            replace(NEED, num_choices=3),
            Reason.CONTEXT_TOO_LONG,
            {"field": "n", "limit": "11"},
        ),
    ],
)
def test_what_no_node_could_ever_serve_is_refused_by_name(nodes, need, reason, metadata):
    with pytest.raises(ServingError) as error:
        choose_pair(nodes, need)
    assert error.value.reason is reason
    assert metadata.items() <= error.value.metadata.items()
