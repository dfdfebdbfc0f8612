"""Pairing by table, and the queue in front of it."""

import asyncio
from dataclasses import replace

import pytest

from coordinator.pairing import MAX_OUTSTANDING, Need, choose_pair
from coordinator.queue import PairingQueue
from coordinator.registry import NodeEntry, Registry
from kvtransfer.layout import KvLayout
from kvtransfer.messages import NodeKey
from protos.errors import Reason, ServingError

FULL = MAX_OUTSTANDING
OTHER = "bfloat16"

LAYOUT = KvLayout(
    model="m",
    model_digest="00",
    dtype="float32",
    block_size=10,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
# 5 blocks.
NEED = Need(num_prompt_tokens=30, max_num_tokens=50)


def node(name: str, **state: object) -> NodeEntry:
    values = {
        "layout": LAYOUT,
        "num_blocks": 100,
        "max_model_len": 999,
        "max_running": 2,
        "is_serving": True,
        "available_blocks": 100,
        **state,
    }
    return NodeEntry(
        key=NodeKey(node_id=name, incarnation=1),
        is_prefill=name.startswith("p"),
        address="127.0.0.1:1",
        **values,
    )


def names(pair) -> tuple[str | None, str | None] | None:
    if pair is None:
        return None
    return tuple(n.key.node_id if n is not None else None for n in (pair.prefill, pair.decode))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("p0"), node("d0")], ("p0", "d0")),
        (
            [node("p0"), node("d0", available_blocks=6), node("d1", available_blocks=7)],
            ("p0", "d1"),
        ),
        (
            [
                node("p0"),
                node("d0", available_blocks=9, held_blocks=3),
                node("d1", available_blocks=7),
            ],
            ("p0", "d1"),
        ),
        (
            [node("p0", outstanding_tokens=9), node("p1", outstanding_tokens=8), node("d0")],
            ("p1", "d0"),
        ),
        (
            [node("p0", num_outstanding=FULL), node("p1", outstanding_tokens=8), node("d0")],
            ("p1", "d0"),
        ),
        ([node("p0", num_outstanding=FULL), node("d0")], None),
        ([node("p0"), node("d0", available_blocks=4)], None),
        ([node("p0"), node("d0", num_running=2)], None),
        ([node("p0"), node("d0", num_running=1, num_held=1)], None),
        ([node("p0"), node("d0", status_seq=4, refused_seq=4)], None),
        ([node("p0"), node("d0", status_seq=5, refused_seq=4)], ("p0", "d0")),
        ([node("d0")], (None, "d0")),
        ([node("p0", is_serving=False), node("d0")], (None, "d0")),
        ([node("p0"), node("d0"), node("d1", is_serving=False)], ("p0", "d0")),
    ],
)
def test_a_request_gets_the_pair_that_the_policy_says(nodes, expected):
    assert names(choose_pair(nodes, NEED)) == expected


def test_one_token_needs_no_decode_node():
    pair = choose_pair([node("p0"), node("d0")], Need(num_prompt_tokens=30, max_num_tokens=31))
    assert names(pair) == ("p0", None)


def test_a_decode_node_is_paired_with_the_prefill_node_of_its_layout():
    other = replace(LAYOUT, block_size=20)
    nodes = [node("p0"), node("p1", layout=other), node("d0", layout=other)]
    assert names(choose_pair(nodes, NEED)) == ("p1", "d0")


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([], Reason.NO_NODES),
        ([node("p0")], Reason.NO_NODES),
        ([node("p0"), node("d0", layout=replace(LAYOUT, dtype=OTHER))], Reason.LAYOUT_MISMATCH),
    ],
)
def test_what_can_never_be_paired_is_an_error(nodes, reason):
    with pytest.raises(ServingError) as error:
        choose_pair(nodes, NEED)
    assert error.value.reason is reason


def queue_over(*nodes: NodeEntry) -> tuple[PairingQueue, Registry]:
    registry = Registry()
    for entry in nodes:
        registry.register(entry)
    return PairingQueue(registry), registry


async def test_requests_are_paired_in_order_and_the_first_is_not_passed():
    decode = node("d0", available_blocks=4, max_running=9)
    queue, registry = queue_over(decode)
    order: list[str] = []

    async def wait(name: str, need: Need) -> None:
        await queue.pair(queue.arrival(), need)
        order.append(name)

    big = asyncio.create_task(wait("big", NEED))
    await asyncio.sleep(0)
    small = asyncio.create_task(wait("small", Need(num_prompt_tokens=1, max_num_tokens=10)))
    await asyncio.sleep(0)
    assert len(queue) == 2
    decode.available_blocks = 6
    registry.changed()
    await asyncio.gather(big, small)
    assert order == ["big", "small"]
    assert (decode.held_blocks, decode.num_held) == (6, 2)


async def test_a_request_that_leaves_the_line_lets_the_next_one_go():
    queue, _ = queue_over(node("d0", available_blocks=1))
    big = asyncio.create_task(queue.pair(queue.arrival(), NEED))
    await asyncio.sleep(0)
    small = asyncio.create_task(
        queue.pair(queue.arrival(), Need(num_prompt_tokens=1, max_num_tokens=2))
    )
    await asyncio.sleep(0)
    assert not small.done()
    big.cancel()
    claim = await small
    assert names(claim.pair) == (None, "d0")


async def test_a_refused_request_comes_back_to_its_old_place():
    decode = node("d0", max_running=9)
    queue, registry = queue_over(decode)
    arrival = queue.arrival()
    claim = await queue.pair(arrival, NEED)
    decode.refused_seq = decode.status_seq
    claim.let_go(decode=True, prefill=True)
    later = asyncio.create_task(queue.pair(queue.arrival(), NEED))
    await asyncio.sleep(0)
    again = asyncio.create_task(queue.pair(arrival, NEED))
    await asyncio.sleep(0)
    decode.status_seq += 1
    decode.available_blocks = 5
    registry.changed()
    await again
    assert not later.done()
    later.cancel()


async def test_a_claim_counts_once_however_often_it_is_let_go():
    prefill, decode = node("p0"), node("d0")
    queue, _ = queue_over(prefill, decode)
    claim = await queue.pair(queue.arrival(), NEED)
    assert (prefill.outstanding_tokens, decode.held_blocks) == (30, 5)
    for _ in range(2):
        claim.let_go(decode=True, prefill=True)
    assert (prefill.outstanding_tokens, prefill.num_outstanding) == (0, 0)
    assert (decode.held_blocks, decode.num_held) == (0, 0)


async def test_a_full_queue_refuses_with_a_delay():
    registry = Registry()
    registry.register(node("d0", available_blocks=0))
    queue = PairingQueue(registry, max_waiting=1)
    waiting = asyncio.create_task(queue.pair(queue.arrival(), NEED))
    await asyncio.sleep(0)
    with pytest.raises(ServingError) as error:
        await queue.pair(queue.arrival(), NEED)
    assert error.value.reason is Reason.QUEUE_FULL
    assert error.value.retry_after_s
    waiting.cancel()


async def test_a_request_that_no_node_takes_any_more_does_not_hold_up_the_line():
    large, small = node("d0", max_running=0), node("d1", max_model_len=20)
    queue, registry = queue_over(large, small)
    waiting = asyncio.create_task(queue.pair(queue.arrival(), NEED))
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.remove(large)
    with pytest.raises(ServingError) as error:
        await waiting
    assert error.value.reason is Reason.CONTEXT_TOO_LONG
    claim = await queue.pair(queue.arrival(), Need(num_prompt_tokens=1, max_num_tokens=9))
    assert names(claim.pair) == (None, "d1")
