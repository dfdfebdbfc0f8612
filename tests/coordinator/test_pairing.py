"""Pairing by table: which nodes, and why, from what they have told."""

from dataclasses import replace

import pytest

from coordinator.need import Need
from coordinator.offers import decode_offer, prefill_offer
from coordinator.pairing import choose_pair
from coordinator.registry import NodeEntry, Registry
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
# 2 ms per prompt token, 20 ms for every step.
SLOW = replace(PROFILE, base_ms=20.0, prefill_token_ms=2.0)
BLOCKS_OF_4 = replace(LAYOUT, block_size=4)
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
        ([node("p0", step_age_s=5.1), node("d0")], (None, "d0", "no prefill node")),
        # Not serving, avoided, or stuck: whatever its load, the other one.
        ([node("p0"), node("d0", is_serving=False), node("d1", num_decoding=7)], ("p0", "d1")),
        ([node("p0"), node("d0", is_avoided=True), node("d1", num_decoding=7)], ("p0", "d1")),
        ([node("p0", is_serving=False), node("p1", queued_tokens=90), node("d0")], ("p1", "d0")),
        ([node("p0", step_age_s=5.1), node("p1", queued_tokens=90), node("d0")], ("p1", "d0")),
        # The lowest predicted ITL, then most blocks.
        ([node("p0"), node("d0", num_decoding=3), node("d1", num_decoding=2)], ("p0", "d1")),
        ([node("p0"), node("d0", num_decoding=3), node("d1", num_held=4)], ("p0", "d0")),
        ([node("p0"), node("d0", available_blocks=60), node("d1")], ("p0", "d1")),
        ([node("p0"), node("d0", held_blocks=1), node("d1")], ("p0", "d1")),
        # 10 + 2 ms beside nobody, 10 + 4 ms beside one: fewer streams before more blocks.
        ([node("p0"), node("d0", available_blocks=6), node("d1", num_decoding=1)], ("p0", "d0")),
        # 20 + 2 ms alone, 10 + 8 ms beside three: the node's own profile counts.
        (
            [node("p0"), node("d0", profile=SLOW), node("d1", num_decoding=3)],
            ("p0", "d1"),
        ),
        # Room: 4 blocks, and one for each request that runs.
        ([node("p0"), node("d0", available_blocks=3)], None),
        ([node("p0"), node("d0", available_blocks=4)], ("p0", "d0")),
        ([node("p0"), node("d0", available_blocks=5, num_running=2)], None),
        ([node("p0"), node("d0", available_blocks=6, num_running=2)], ("p0", "d0")),
        ([node("p0"), node("d0", available_blocks=9, held_blocks=6)], None),
        ([node("p0"), node("d0", num_running=8)], None),
        ([node("p0"), node("d0", num_running=7)], ("p0", "d0")),
        ([node("p0"), node("d0", num_running=7, num_held=1)], None),
        # Beside 7 on a node of 10 blocks: all that is left of it is headroom enough.
        ([node("p0"), node("d0", num_blocks=10, available_blocks=10, num_running=7)], ("p0", "d0")),
        ([node("p0"), node("d0", num_blocks=10, available_blocks=9, num_running=7)], None),
        # 31 tokens are 8 blocks of 4.
        ([node("p0"), node("d0", layout=BLOCKS_OF_4, available_blocks=7)], None),
        ([node("p0"), node("d0", layout=BLOCKS_OF_4, available_blocks=8)], ("p0", "d0")),
        ([node("p0"), node("d0", refused_seq=0)], None),
        ([node("p0"), node("d0", refused_seq=0, status_seq=1)], ("p0", "d0")),
        # Stuck: 5 s is the floor, 20 times the prediction the limit.
        ([node("p0"), node("d0", step_age_s=5.1), node("d1", num_decoding=9)], ("p0", "d1")),
        ([node("p0"), node("d0", step_age_s=5.1, step_predicted_s=0.3)], ("p0", "d0")),
        # The earliest first token; what was sent and not told of counts too.
        ([node("p0", queued_tokens=90), node("p1", unseen_tokens=80), node("d0")], ("p1", "d0")),
        # 30 tokens in 60 ms, or in 20 + 30 ms; the base is of every step, and decides nothing.
        (
            [node("p0", profile=SLOW), node("p1", queued_tokens=20), node("d0")],
            ("p1", "d0"),
        ),
        (
            [node("p0", profile=SLOW), node("p1", queued_tokens=31), node("d0")],
            ("p0", "d0"),
        ),
        # A prefill node must take the prompt and its first token: 31.
        ([node("p0", max_model_len=30), node("p1", queued_tokens=90), node("d0")], ("p1", "d0")),
        ([node("p0", max_model_len=31), node("p1", queued_tokens=90), node("d0")], ("p0", "d0")),
        ([node("p0"), node("d0", max_model_len=49), node("d1", num_decoding=7)], ("p0", "d1")),
        # Busy prefill nodes get the next prompt when no more than 100 ms are ahead.
        (
            [node("p0", queued_tokens=100, num_outstanding=1), node("d0", num_decoding=20)],
            ("p0", "d0"),
        ),
        ([node("p0", queued_tokens=5000, num_outstanding=16), node("d0", num_decoding=20)], None),
        # Other block sizes and orders are translated; other models are not.
        ([node("p0", layout=BLOCKS_OF_4), node("d0")], ("p0", "d0")),
        ([node("p0", layout=replace(LAYOUT, inner_order="2LSHD")), node("d0")], ("p0", "d0")),
        (
            [node("p0", layout=replace(LAYOUT, model_digest="01")), node("p1"), node("d0")],
            ("p1", "d0"),
        ),
        (
            [node("p0"), node("d0", layout=replace(LAYOUT, dtype="bfloat16")), node("d1")],
            ("p0", "d1"),
        ),
    ],
)
def test_a_pair_is_chosen_by_what_the_nodes_have_told(nodes, expected):
    got = chosen(*nodes, may_be_local=False)
    assert (got and got[: len(expected)]) == expected


def test_predictions_are_the_profile_over_what_is_ahead():
    profile = replace(PROFILE, decode_context_ms=0.125, prefill_context_ms=0.0625)
    need = Need(num_prompt_tokens=32, max_num_tokens=50, num_choices=3)
    decode = node("d0", profile=profile, num_decoding=2, num_held=1, decode_context=100)
    # 6 rows; 100 positions and 32 more for each of the three choices.
    assert decode_offer(decode, need).itl_ms == 10 + 6 * 2 + (100 + 3 * 32) * 0.125
    # 32 tokens attend 528 positions. Locally the two rows take 10 + 4 + 12.5 of each 50 ms.
    prompt_ms = 32 + 528 * 0.0625
    assert decode_offer(decode, need).local_ms == pytest.approx(prompt_ms / (1 - 26.5 / 50))
    # The last of four blocks of 80 bytes, at 1 MB per ms.
    prefill = node("p0", profile=profile, queued_tokens=20, unseen_tokens=5)
    first_token_ms = prefill_offer(prefill, need).first_token_ms()
    assert first_token_ms == pytest.approx(25 + prompt_ms + 4 * 80 / 1e6)


@pytest.mark.parametrize(
    ("ahead", "num_prompt_tokens", "is_sent"),
    [
        (100, 51, True),
        (101, 51, False),
        # Half of what is ahead, and no more.
        (102, 51, True),
        (500, 250, True),
        (500, 251, False),
    ],
)
def test_a_busy_prefill_node_gets_what_keeps_it_busy_and_what_may_pass(
    ahead, num_prompt_tokens, is_sent
):
    need = Need(num_prompt_tokens=num_prompt_tokens, max_num_tokens=300)
    busy = node("p0", queued_tokens=ahead, num_outstanding=15)
    expected = ("p0", "d0", "paired") if is_sent else None
    assert chosen(busy, node("d0"), need=need, may_be_local=False) == expected
    # Sixteen are enough, however short; one that this coordinator has given nothing takes one.
    busy.num_outstanding = 16
    assert chosen(busy, node("d0"), need=need, may_be_local=False) is None
    busy.num_outstanding = 0
    assert chosen(busy, node("d0"), need=need, may_be_local=False) == ("p0", "d0", "paired")


@pytest.mark.parametrize(
    ("prefill", "decode", "is_local"),
    [
        # 30 ms of prompt beside a decode step of 14 ms fit 50 ms; there are 500 ms ahead of it.
        ({"queued_tokens": 500}, {"num_decoding": 2}, True),
        # Idle prefill nodes are never passed by.
        ({}, {"num_decoding": 2}, False),
        # 20 + 30 ms just fit, 22 + 30 ms do not.
        ({"queued_tokens": 500}, {"num_decoding": 5}, True),
        ({"queued_tokens": 500}, {"num_decoding": 6}, False),
        # In 0.72 of each step: 30 / 0.72 = 41.7 ms, against 11 + 30 ms and 12 + 30 ms.
        ({"queued_tokens": 11}, {"num_decoding": 2}, False),
        ({"queued_tokens": 12}, {"num_decoding": 2}, True),
        # The decode node has prompts of its own: (360 + 30) / 0.72 = 541.7 ms, against 530 ms.
        ({"queued_tokens": 500}, {"num_decoding": 2, "queued_tokens": 360}, False),
        ({"queued_tokens": 500}, {"num_decoding": 2, "unseen_tokens": 360}, False),
        ({"queued_tokens": 500}, {"num_decoding": 2, "queued_tokens": 350}, True),
    ],
)
def test_a_short_prompt_is_local_when_prefill_is_busy_and_the_step_budget_holds_it(
    prefill, decode, is_local
):
    nodes = node("p0", num_outstanding=1, **prefill), node("d0", **decode)
    local, remote = (None, "d0", "short prompt, prefill busy"), ("p0", "d0", "paired")
    assert chosen(*nodes) == (local if is_local else remote)
    assert chosen(*nodes, may_be_local=False) == remote


@pytest.mark.parametrize(
    ("decode", "others", "is_local"),
    [
        # Full: 16 outstanding, 2000 + 300 ms. Locally 300 ms have all of the node, or a tenth.
        ({}, [], True),
        ({"num_decoding": 20}, [], False),
        # 10 + 2 * 17 = 44 of 50 ms: 300 / 0.12 = 2500 ms. 42 ms: 300 / 0.16 = 1875 ms.
        ({"num_decoding": 17}, [], False),
        ({"num_decoding": 16}, [], True),
        # Sooner than every prefill node that could ship to it: 100 + 300 ms are soon.
        ({"num_decoding": 10}, [], True),
        ({"num_decoding": 10}, [node("p1", queued_tokens=100, num_outstanding=16)], False),
        (
            {"num_decoding": 10},
            [
                node(
                    "p1",
                    queued_tokens=100,
                    num_outstanding=16,
                    layout=replace(LAYOUT, num_kv_heads=2),
                )
            ],
            True,
        ),
    ],
)
def test_a_saturated_prefill_pool_is_passed_by_only_when_that_is_sooner(decode, others, is_local):
    need = Need(num_prompt_tokens=300, max_num_tokens=350)
    nodes = (
        node("p0", queued_tokens=2000, num_outstanding=16),
        node("d0", max_running=32, **decode),
        *others,
    )
    assert chosen(*nodes, need=need) == ((None, "d0", "prefill saturated") if is_local else None)
    assert chosen(*nodes, need=need, may_be_local=False) is None


ONE_TOKEN = Need(num_prompt_tokens=30, max_num_tokens=31)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("p0"), node("d0")], ("p0", None, "one token")),
        ([node("p0"), node("d0", available_blocks=0)], ("p0", None, "one token")),
        ([node("p0"), node("d0", is_serving=False)], ("p0", None, "one token")),
        ([node("p0"), node("d0", max_model_len=9)], ("p0", None, "one token")),
        ([node("p0"), node("d0", layout=replace(LAYOUT, head_dim=2))], ("p0", None, "one token")),
        ([node("p0")], ("p0", None, "one token")),
        ([node("p0", queued_tokens=9), node("p1", queued_tokens=8)], ("p1", None, "one token")),
        ([node("p0", num_outstanding=16), node("d0")], None),
        ([node("d0")], (None, "d0", "no prefill node")),
        ([node("p0", is_avoided=True), node("d0")], (None, "d0", "no prefill node")),
    ],
)
def test_one_token_needs_no_decode_node_where_there_are_prefill_nodes(nodes, expected):
    assert chosen(*nodes, need=ONE_TOKEN) == expected


def test_one_token_of_each_of_two_choices_needs_a_decode_node():
    two = replace(ONE_TOKEN, num_choices=2)
    assert chosen(node("p0"), node("d0"), need=two) == ("p0", "d0", "paired")


def test_choices_take_blocks_and_rows_each():
    # 4 blocks, and 2 for each choice but the first.
    three = replace(NEED, num_choices=3)
    assert chosen(node("p0"), node("d0", available_blocks=7), need=three) is None
    assert chosen(node("p0"), node("d0", available_blocks=8), need=three) is not None
    assert chosen(node("p0"), node("d0", num_running=5), need=three) is not None
    assert chosen(node("p0"), node("d0", num_running=6), need=three) is None
    # More than a step's rows: alone on its node.
    nine = replace(NEED, num_choices=9)
    assert chosen(node("p0"), node("d0"), need=nine) is not None
    assert chosen(node("p0"), node("d0", num_running=1), need=nine) is None


@pytest.mark.parametrize(
    ("nodes", "need", "reason", "metadata"),
    [
        ([node("p0")], NEED, Reason.NO_NODES, {}),
        ([], NEED, Reason.NO_NODES, {}),
        ([node("p0", is_serving=False)], ONE_TOKEN, Reason.NO_NODES, {}),
        ([node("p0"), node("d0", is_serving=False)], NEED, Reason.NO_NODES, {}),
        ([node("p0"), node("d0", step_age_s=5.1)], NEED, Reason.NO_NODES, {}),
        (
            [node("d0", max_model_len=48), node("d1", max_model_len=49)],
            NEED,
            Reason.CONTEXT_TOO_LONG,
            {"limit": "49"},
        ),
        (
            [node("p0", max_model_len=30), node("d0")],
            NEED,
            Reason.CONTEXT_TOO_LONG,
            {"limit": "30"},
        ),
        ([node("p0", max_model_len=30)], ONE_TOKEN, Reason.CONTEXT_TOO_LONG, {"limit": "30"}),
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


def test_the_most_choices_that_a_pool_holds_are_taken():
    assert chosen(node("d0", num_blocks=12), need=replace(NEED, num_choices=3)) is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_digest", "01"),
        ("dtype", "bfloat16"),
        ("num_layers", 2),
        ("num_kv_heads", 2),
        ("head_start", 1),
        ("head_dim", 2),
    ],
)
def test_the_field_that_keeps_all_nodes_apart_is_named(field, value):
    other = replace(BLOCKS_OF_4, **{field: value})
    with pytest.raises(ServingError, match=f"differ in {field}: ") as error:
        choose_pair([node("p0", layout=other), node("d0")], NEED)
    assert error.value.reason is Reason.LAYOUT_MISMATCH
    assert error.value.metadata["field"] == field


# A prompt of ten blocks of 10 tokens, and 5 tokens more.
CHAIN = tuple(range(1000, 1010))
LONG = Need(num_prompt_tokens=105, max_num_tokens=150, block_hashes=lambda _: CHAIN)


def having(name: str, num_blocks: int, **state: object) -> NodeEntry:
    """A node that has the first blocks of CHAIN."""
    result = node(name, **state)
    assert result.index.take_in(seq=0, added=CHAIN[:num_blocks], is_snapshot=True)
    return result


def test_offers_count_what_is_not_cached():
    profile = replace(PROFILE, prefill_context_ms=0.0625)
    prefill = prefill_offer(having("p0", 6, profile=profile, queued_tokens=20), LONG)
    # 45 tokens from position 60 attend 45 * 60 + 45 * 46 / 2 = 3735 positions, all 105 5565.
    assert prefill.num_cached == 60
    assert prefill.compute_ms == pytest.approx(45 + 3735 * 0.0625)
    assert prefill.saved_ms == pytest.approx(60 + (5565 - 3735) * 0.0625)
    assert prefill.drawn_ms == pytest.approx(20 + prefill.compute_ms)
    decode = decode_offer(having("d0", 9, num_decoding=5), LONG)
    # Two rows of 10 + 2 * 5 ms in 50: 15 tokens get 0.6 of each step.
    assert (decode.num_cached, decode.saved_ms) == (90, 90)
    assert decode.local_ms == pytest.approx(15 / 0.6)
    assert decode.is_short


def test_transfer_shows_where_it_is_longer_than_the_compute():
    # 11 blocks of 20 MB, 20 ms each; 260 tokens and more are the last chunk: all of them.
    large = replace(LAYOUT, num_layers=250, num_kv_heads=10, head_dim=100)
    offer = prefill_offer(having("p0", 10, layout=large), LONG)
    assert offer.block_ms == 20.0
    assert offer.first_token_ms() == pytest.approx(5 + 11 * 20)
    assert offer.first_token_ms(num_cached_there=90) == pytest.approx(5 + 2 * 20)
    # 40 blocks, of which the last 26 go after 400 ms of compute, which hides 14 blocks.
    whole = replace(LONG, num_prompt_tokens=400, block_hashes=lambda _: ())
    assert prefill_offer(node("p0", layout=large), whole).first_token_ms() == 400 + 26 * 20
    fast = replace(PROFILE, prefill_token_ms=0.1)
    offer = prefill_offer(node("p0", layout=large, profile=fast), whole)
    # 40 ms of compute hide 2.
    assert offer.first_token_ms() == pytest.approx(40 + 38 * 20)


def test_an_exact_repeat_computes_its_last_token():
    exact = replace(LONG, num_prompt_tokens=100)
    assert prefill_offer(having("p0", 10), exact).num_cached == 99


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        # 60 ms saved: worth 60 ms of waiting, and as much again for those who wait behind it.
        (0, "p1"),
        (119, "p1"),
        (121, "p0"),
    ],
)
def test_a_prefill_node_with_the_prefix_is_waited_for_as_long_as_that_is_worth_it(ahead, expected):
    busy = having("p1", 6, queued_tokens=ahead, num_outstanding=1)
    pair = choose_pair([node("p0"), busy, node("d0", num_decoding=20)], LONG)
    assert pair.prefill.key.node_id == expected
    assert pair.prefill_cached_tokens == pair.cached_tokens == (60 if expected == "p1" else 0)


@pytest.mark.parametrize(("ahead", "is_sent"), [(100, True), (101, False)])
def test_nobody_is_sent_to_a_busy_node_with_the_prefix_while_no_node_is_free_soon(ahead, is_sent):
    full = node("p0", queued_tokens=500, num_outstanding=16)
    there = having("p1", 6, queued_tokens=ahead, num_outstanding=1)
    # 340 of 400 tokens are left: no short prompt.
    need = replace(LONG, num_prompt_tokens=400, max_num_tokens=450)
    nodes = [full, there, node("d0", num_decoding=20)]
    assert (choose_pair(nodes, need, may_be_local=False) is not None) == is_sent


@pytest.mark.parametrize(
    ("decode", "is_local"),
    [
        # 15 of 105 tokens are left: 15 ms beside a step of 10 + 2 * 2 ms.
        ({"num_blocks": 9, "num_decoding": 2}, True),
        # 35 and 10 + 2 * 3 ms are over the budget of 50 ms; 80 of 105 tokens are nearly all.
        ({"num_blocks": 8, "num_decoding": 7}, True),
        ({"num_blocks": 8, "num_decoding": 8}, False),
        # 70 are not.
        ({"num_blocks": 7, "num_decoding": 2}, False),
    ],
)
def test_a_decode_node_that_has_nearly_all_of_the_prompt_computes_the_rest(decode, is_local):
    there = having("d0", decode["num_blocks"], num_decoding=decode["num_decoding"], max_running=99)
    nodes = [node("p0"), there]
    num_cached = 10 * decode["num_blocks"]
    pair = choose_pair(nodes, LONG)
    assert (pair.prefill is None) == is_local
    assert pair.reason == ("prefix cached" if is_local else "paired")
    assert pair.decode_cached_tokens == num_cached
    assert pair.cached_tokens == (num_cached if is_local else 0)
    assert choose_pair(nodes, LONG, may_be_local=False).reason == "paired"


def test_a_cached_prompt_stays_where_it_is_though_the_prefill_node_was_measured_slower():
    # Both have 90 of 105 tokens. SLOW saves 180 ms by them, twice what the decode node does.
    nodes = [having("p0", 9, profile=SLOW), having("d0", 9)]
    assert choose_pair(nodes, LONG).reason == "prefix cached"


def test_a_hot_prefix_does_not_pile_everything_on_one_decode_node():
    # A stream more costs 2 ms between tokens, 64 times: 128 ms. 9 blocks there are worth the 90 ms
    # that they save, the 90 ms by which the first token is sooner, and a step of 50 ms.
    def decode_node(num_decoding: int) -> str:
        hot = having("d0", 9, num_decoding=num_decoding)
        return choose_pair([node("p0"), hot, node("d1")], LONG).decode.key.node_id

    assert decode_node(1) == "d0"
    assert decode_node(2) == "d1"


def test_nodes_that_are_alike_take_turns():
    known = Registry()
    for name in ("p0", "p1", "p2", "d0", "d1"):
        known.register(node(name))
    pairs = []
    for _ in range(4):
        pair = choose_pair(known.nodes.values(), NEED)
        known.given(pair.prefill, pair.decode)
        pairs.append(f"{pair.prefill.key.node_id} {pair.decode.key.node_id}")
    assert pairs == ["p0 d0", "p1 d1", "p2 d0", "p0 d1"]
