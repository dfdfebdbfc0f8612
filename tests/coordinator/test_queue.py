"""The line in front of pairing: whose turn it is, what is refused, and that nothing stays held."""

import asyncio

import pytest
from test_pairing import NEED, PROFILE, node

from coordinator.fair_line import QUANTUM_TOKENS, FairLine, Place
from coordinator.pairing import Need
from coordinator.queue import PairingQueue
from coordinator.registry import Registry
from protos.errors import Reason, ServingError

FULL = {"available_blocks": 0}


def registry(**decode: object) -> Registry:
    result = Registry()
    result.register(node("p0"))
    result.register(node("d0", **decode))
    return result


def room_appears(known: Registry) -> None:
    known.nodes["d0"].available_blocks = 100
    known.changed()


def is_untouched(known: Registry) -> bool:
    return all(
        (n.held_blocks, n.num_held, n.num_outstanding) == (0, 0, 0) for n in known.nodes.values()
    )


async def test_a_claim_holds_its_nodes_until_they_have_answered():
    known = registry()
    queue = PairingQueue(known)
    claim = await queue.pair(queue.place(NEED), NEED)
    decode, prefill = known.nodes["d0"], known.nodes["p0"]
    assert (decode.held_blocks, decode.num_held) == (4, 1)
    assert (prefill.num_outstanding, prefill.unseen_tokens) == (1, 30)
    claim.let_go(decode=True)
    claim.let_go(decode=True)
    assert (decode.held_blocks, prefill.num_outstanding) == (0, 1)
    claim.let_go(decode=True, prefill=True)
    assert is_untouched(known)


async def test_requests_are_paired_in_order_of_arrival_when_room_appears():
    known = registry(**FULL)
    queue = PairingQueue(known)
    order: list[int] = []

    async def wait(index: int, place: Place) -> None:
        claim = await queue.pair(place, NEED)
        order.append(index)
        claim.let_go(decode=True, prefill=True)

    places = [queue.place(NEED) for _ in range(4)]
    tasks = [asyncio.create_task(wait(index, places[index])) for index in (2, 0, 3, 1)]
    await asyncio.sleep(0)
    assert len(queue) == 4
    room_appears(known)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]
    assert is_untouched(known)


@pytest.mark.parametrize("moment", ["waiting", "paired"])
async def test_a_request_that_is_cancelled_leaves_nothing(moment):
    known = registry(**FULL)
    queue = PairingQueue(known)
    task = asyncio.create_task(queue.pair(queue.place(NEED), NEED))
    await asyncio.sleep(0)
    if moment == "paired":
        room_appears(known)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(queue) == 0
    assert is_untouched(known)


async def test_a_full_queue_refuses_by_count_and_by_tokens():
    known = registry(**FULL)
    queue = PairingQueue(known, max_waiting=2, max_waiting_tokens=120)
    place = queue.place(NEED)
    waiting = asyncio.create_task(queue.pair(place, NEED))
    await asyncio.sleep(0)
    queue.admit(queue.place(NEED), NEED, remaining_s=60)
    large = Need(num_prompt_tokens=30, max_num_tokens=71)
    with pytest.raises(ServingError, match="50 tokens are waiting") as error:
        queue.admit(queue.place(large), large, remaining_s=60)
    assert error.value.reason is Reason.QUEUE_FULL
    assert error.value.retry_after_s == 1.0
    assert error.value.metadata["limit"] == "120"
    second = asyncio.create_task(queue.pair(queue.place(NEED), NEED))
    await asyncio.sleep(0)
    with pytest.raises(ServingError, match="2 requests are waiting"):
        queue.admit(queue.place(NEED), NEED, remaining_s=60)
    for task in (waiting, second):
        task.cancel()
    await asyncio.gather(waiting, second, return_exceptions=True)


async def test_a_deadline_that_the_prediction_does_not_meet_is_refused_with_it():
    known = registry()
    known.nodes["p0"].queued_tokens = 1000
    queue = PairingQueue(known)
    assert PROFILE.prefill_token_ms == 1.0
    queue.admit(queue.place(NEED), NEED, remaining_s=1.04)
    with pytest.raises(ServingError) as error:
        queue.admit(queue.place(NEED), NEED, remaining_s=1.02)
    assert error.value.reason is Reason.DEADLINE_UNREACHABLE
    assert error.value.metadata["predicted_s"] == "1.030"


def served(line: FairLine[str]) -> list[str]:
    order = []
    while (first := line.first()) is not None:
        assert line.first() == first
        line.take(first[0])
        order.append(first[1])
    assert (len(line), line.num_tokens) == (0, 0)
    return order


def test_a_flood_delays_another_tenant_by_a_turn_and_not_by_its_length():
    line: FairLine[str] = FairLine()
    for index in range(6):
        line.add(Place(arrival=index, tenant="flood", num_tokens=QUANTUM_TOKENS // 2), f"f{index}")
    line.add(Place(arrival=6, tenant="calm", num_tokens=QUANTUM_TOKENS // 2), "c0")
    line.add(Place(arrival=7, tenant="calm", num_tokens=QUANTUM_TOKENS // 2), "c1")
    assert served(line) == ["f0", "f1", "c0", "c1", "f2", "f3", "f4", "f5"]


def test_a_weight_is_a_share():
    line: FairLine[str] = FairLine(weights={"a": 2.0})
    for index in range(4):
        line.add(Place(arrival=index, tenant="a", num_tokens=QUANTUM_TOKENS), f"a{index}")
        line.add(Place(arrival=9 + index, tenant="b", num_tokens=QUANTUM_TOKENS), f"b{index}")
    assert served(line) == ["a0", "a1", "b0", "a2", "a3", "b1", "b2", "b3"]


def test_priority_goes_first_and_a_request_that_comes_back_has_its_age():
    line: FairLine[str] = FairLine()
    line.add(Place(arrival=5, num_tokens=1), "later")
    line.add(Place(arrival=9, priority=1, num_tokens=1), "urgent")
    line.add(Place(arrival=2, num_tokens=1), "came back")
    assert served(line) == ["urgent", "came back", "later"]


def test_who_leaves_does_not_pay():
    line: FairLine[str] = FairLine()
    gone = Place(arrival=0, tenant="a", num_tokens=QUANTUM_TOKENS)
    line.add(gone, "gone")
    line.add(Place(arrival=1, tenant="a", num_tokens=QUANTUM_TOKENS), "a")
    line.add(Place(arrival=2, tenant="b", num_tokens=QUANTUM_TOKENS), "b")
    assert gone in line
    line.leave(gone)
    assert gone not in line
    assert served(line) == ["a", "b"]
