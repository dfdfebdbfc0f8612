"""The line in front of pairing: who is next, what is refused, and that nothing stays held."""

import asyncio
import random
from dataclasses import replace

import pytest
from test_pairing import NEED, node

from coordinator.fair_line import QUANTUM_TOKENS, Place
from coordinator.need import Need
from coordinator.queue import Claim, PairingQueue
from coordinator.registry import Registry
from protos.errors import Reason, ServingError

FULL = {"available_blocks": 0}
# Four blocks of prompt, and more than nobody's whole turn.
WHOLE_TURN = Need(num_prompt_tokens=30, max_num_tokens=QUANTUM_TOKENS)


def registry(**decode: object) -> Registry:
    result = Registry()
    result.register(node("p0", max_model_len=9999))
    result.register(node("d0", max_model_len=9999, **decode))
    return result


def room_appears(known: Registry, *, blocks: int = 100) -> None:
    """The decode node's next status."""
    known.nodes["d0"].available_blocks = blocks
    known.nodes["d0"].status_seq += 1
    known.changed()


def is_untouched(known: Registry) -> bool:
    return all(
        (n.held_blocks, n.num_held, n.num_outstanding) == (0, 0, 0) for n in known.nodes.values()
    )


class Waiters:
    """Tasks that wait for their claims; order has their names as they were paired."""

    def __init__(self, queue: PairingQueue) -> None:
        self.order: list[str] = []
        self.claims: dict[str, Claim] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._queue = queue

    async def join(self, name: str, need: Need = NEED, *, place: Place | None = None, **at) -> None:
        place = place or self._queue.place(need, **at)
        self.tasks[name] = asyncio.create_task(self._wait(name, place, need))
        # Its first step: from here on it stands in line.
        await asyncio.sleep(0)

    async def finish(self) -> list[str]:
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks.values())
        return self.order

    def let_go(self, name: str) -> None:
        self.claims[name].let_go(decode=True, prefill=True)

    async def _wait(self, name: str, place: Place, need: Need) -> None:
        claim = await self._queue.pair(place, need)
        self.claims[name] = claim
        self.order.append(name)


async def test_a_claim_holds_its_nodes_until_they_have_answered():
    known = registry()
    queue = PairingQueue(known)
    claim = await queue.pair(queue.place(NEED), NEED)
    decode, prefill = known.nodes["d0"], known.nodes["p0"]
    assert (decode.held_blocks, decode.num_held) == (4, 1)
    assert (prefill.num_outstanding, prefill.unseen_tokens) == (1, 30)
    claim.let_go(decode=True)
    claim.let_go(decode=True)
    assert (decode.held_blocks, decode.num_held, prefill.num_outstanding) == (0, 0, 1)
    claim.let_go(decode=True, prefill=True)
    assert is_untouched(known)


async def test_a_claim_of_one_node_holds_only_that():
    known = registry()
    queue = PairingQueue(known)
    one_token = Need(num_prompt_tokens=30, max_num_tokens=31)
    claim = await queue.pair(queue.place(one_token), one_token)
    decode, prefill = known.nodes["d0"], known.nodes["p0"]
    assert (decode.held_blocks, decode.num_held, prefill.num_outstanding) == (0, 0, 1)
    claim.let_go(decode=True, prefill=True)
    known.remove(prefill)
    three = replace(NEED, num_choices=3)
    claim = await queue.pair(queue.place(three), three)
    # 4 blocks, and 2 for each choice but the first; the prompt is computed there.
    assert (decode.held_blocks, decode.num_held, decode.unseen_tokens) == (8, 3, 30)
    claim.let_go(decode=True, prefill=True)
    assert is_untouched(known)


async def test_requests_are_paired_in_order_of_arrival_when_room_appears():
    known = registry(**FULL)
    queue = PairingQueue(known)
    waiters = Waiters(queue)
    places = [queue.place(NEED) for _ in range(4)]
    for index in (2, 0, 3, 1):
        await waiters.join(f"r{index}", place=places[index])
    assert (len(queue), queue.num_tokens, waiters.order) == (4, 200, [])
    room_appears(known)
    assert await waiters.finish() == ["r0", "r1", "r2", "r3"]
    assert (len(queue), queue.num_tokens) == (0, 0)


async def test_room_that_appears_is_given_to_as_many_as_it_holds():
    known = registry(**FULL)
    waiters = Waiters(PairingQueue(known))
    for name in ("a", "b", "c"):
        await waiters.join(name)
    # Four blocks each, and one beside a request that is held.
    room_appears(known, blocks=9)
    await asyncio.gather(waiters.tasks["a"], waiters.tasks["b"])
    assert waiters.order == ["a", "b"]
    # What a claim gives back is given to the next at once.
    waiters.let_go("a")
    await waiters.finish()
    assert waiters.order == ["a", "b", "c"]


async def test_a_node_that_registers_pairs_the_first_who_waits():
    known = registry(**FULL)
    waiters = Waiters(PairingQueue(known))
    await waiters.join("a")
    known.register(node("d1"))
    await waiters.finish()
    assert waiters.claims["a"].pair.decode is known.nodes["d1"]


async def test_a_large_request_is_not_passed_by_small_ones():
    known = registry(available_blocks=50)
    waiters = Waiters(PairingQueue(known))
    # 501 tokens: 51 blocks.
    await waiters.join("large", Need(num_prompt_tokens=500, max_num_tokens=510))
    await waiters.join("small")
    assert waiters.order == []
    room_appears(known)
    assert await waiters.finish() == ["large", "small"]


async def test_a_request_that_was_refused_keeps_its_place():
    known = registry(available_blocks=4)
    queue = PairingQueue(known)
    waiters = Waiters(queue)
    place = queue.place(NEED)
    await waiters.join("a", place=place)
    await waiters.join("b")
    assert waiters.order == ["a"]
    # The node had no room after all; b may not have it either before its next status.
    decode = known.nodes["d0"]
    decode.refused_seq = decode.status_seq
    waiters.let_go("a")
    await waiters.join("a again", place=place)
    assert waiters.order == ["a"]
    room_appears(known, blocks=4)
    await asyncio.gather(waiters.tasks["a again"])
    waiters.let_go("a again")
    assert await waiters.finish() == ["a", "a again", "b"]


async def test_tenants_and_priorities_have_their_turns():
    known = registry(**FULL)
    queue = PairingQueue(known, weights={"calm": 2.0})
    waiters = Waiters(queue)
    for index in range(3):
        await waiters.join(f"f{index}", WHOLE_TURN, tenant="flood")
    for index in range(3):
        await waiters.join(f"c{index}", WHOLE_TURN, tenant="calm")
    await waiters.join("urgent", priority=1, tenant="flood")
    room_appears(known)
    assert await waiters.finish() == ["urgent", "f0", "c0", "c1", "f1", "c2", "f2"]


async def test_choices_cost_their_tokens_each():
    queue = PairingQueue(registry())
    assert queue.place(NEED).num_tokens == 30 + 20
    assert queue.place(replace(NEED, num_choices=3)).num_tokens == 30 + 3 * 20


@pytest.mark.parametrize(
    "moment", ["before it began", "waiting", "as room appears", "just paired", "at its deadline"]
)
async def test_a_request_that_is_cancelled_leaves_nothing_and_lets_the_next_go(moment):
    known = registry(**FULL)
    queue = PairingQueue(known)
    waiters = Waiters(queue)
    if moment == "before it began":
        waiters.tasks["gone"] = asyncio.create_task(queue.pair(queue.place(NEED), NEED))
    elif moment == "at its deadline":
        waiters.tasks["gone"] = asyncio.create_task(
            asyncio.wait_for(queue.pair(queue.place(NEED), NEED), timeout=0.01)
        )
        await asyncio.sleep(0)
    else:
        await waiters.join("gone")
    await waiters.join("next")
    if moment == "just paired":
        # Room for one: it has its claim, and does not know yet.
        room_appears(known, blocks=4)
    gone = waiters.tasks.pop("gone")
    if moment != "at its deadline":
        gone.cancel()
    if moment == "as room appears":
        room_appears(known, blocks=4)
    with pytest.raises((asyncio.CancelledError, TimeoutError)):
        await gone
    if moment not in ("just paired", "as room appears"):
        room_appears(known, blocks=4)
    assert await waiters.finish() == ["next"]
    waiters.let_go("next")
    assert (len(queue), queue.num_tokens) == (0, 0)
    assert is_untouched(known)


async def test_a_large_request_that_is_cancelled_lets_those_behind_it_go_at_once():
    known = registry(available_blocks=50)
    waiters = Waiters(PairingQueue(known))
    await waiters.join("large", Need(num_prompt_tokens=500, max_num_tokens=510))
    await waiters.join("small")
    waiters.tasks.pop("large").cancel()
    # No node tells of anything meanwhile.
    assert await waiters.finish() == ["small"]


async def test_a_request_that_was_cancelled_does_not_pay_for_room_that_it_did_not_take():
    known = registry(**FULL)
    waiters = Waiters(PairingQueue(known))
    await waiters.join("gone", WHOLE_TURN, tenant="a")
    await waiters.join("a", WHOLE_TURN, tenant="a")
    await waiters.join("b", WHOLE_TURN, tenant="b")
    waiters.tasks.pop("gone").cancel()
    # Its coroutine does not know yet.
    room_appears(known)
    assert await waiters.finish() == ["a", "b"]


@pytest.mark.parametrize("seed", range(20))
async def test_cancellations_at_random_moments_leak_no_claim(seed):
    rng = random.Random(seed)
    known = registry(available_blocks=12)
    queue = PairingQueue(known, weights={"a": 2.0})

    async def request() -> None:
        need = Need(num_prompt_tokens=rng.randrange(1, 90), max_num_tokens=rng.randrange(92, 200))
        place = queue.place(need, priority=rng.randrange(2), tenant=rng.choice("abc"))
        while True:
            claim = await queue.pair(place, need)
            try:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                claim.let_go(decode=rng.random() < 0.5, prefill=rng.random() < 0.5)
                await asyncio.sleep(0)
            finally:
                claim.let_go(decode=True, prefill=True)
            if rng.random() < 0.7:
                return

    tasks = [asyncio.create_task(request()) for _ in range(60)]
    for _ in range(80):
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
        if rng.random() < 0.3:
            room_appears(known, blocks=rng.choice([0, 5, 12, 100]))
        await asyncio.sleep(0)
    room_appears(known)
    async with asyncio.timeout(5):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
    assert (len(queue), queue.num_tokens) == (0, 0)
    assert is_untouched(known)


async def test_those_who_wait_hear_at_once_that_no_node_is_left():
    known = registry(**FULL)
    queue = PairingQueue(known)
    waiters = Waiters(queue)
    await waiters.join("a")
    await waiters.join("b")
    known.remove(known.nodes["d0"])
    for name in ("a", "b"):
        with pytest.raises(ServingError) as error:
            await waiters.tasks[name]
        assert error.value.reason is Reason.NO_NODES
    assert (len(queue), queue.num_tokens) == (0, 0)
    assert is_untouched(known)


async def test_a_request_that_nobody_can_serve_does_not_hold_up_the_next():
    known = registry(**FULL)
    waiters = Waiters(PairingQueue(known))
    await waiters.join("long", Need(num_prompt_tokens=30, max_num_tokens=10_000))
    await waiters.join("a")
    with pytest.raises(ServingError) as error:
        await waiters.tasks.pop("long")
    assert error.value.reason is Reason.CONTEXT_TOO_LONG
    room_appears(known)
    assert await waiters.finish() == ["a"]


async def test_a_full_queue_refuses_by_count_and_by_tokens():
    known = registry(**FULL)
    queue = PairingQueue(known, max_waiting=2, max_waiting_tokens=120)
    waiters = Waiters(queue)
    await waiters.join("a")
    # 50 tokens wait: 70 more are as many as may, 71 are not.
    for num_tokens in (69, 70):
        need = replace(NEED, max_num_tokens=num_tokens)
        queue.admit(queue.place(need), need, remaining_s=60)
    large = replace(NEED, max_num_tokens=71)
    with pytest.raises(ServingError, match="50 tokens are waiting, 71 more") as error:
        queue.admit(queue.place(large), large, remaining_s=60)
    assert (error.value.reason, error.value.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    assert error.value.metadata == {"limit": "120"}
    await waiters.join("b")
    with pytest.raises(ServingError, match="2 requests are waiting") as error:
        queue.admit(queue.place(NEED), NEED, remaining_s=60)
    assert (error.value.reason, error.value.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    assert error.value.metadata == {"limit": "2"}
    # A place that is free again can be taken.
    waiters.tasks.pop("b").cancel()
    await asyncio.sleep(0)
    queue.admit(queue.place(NEED), NEED, remaining_s=60)
    room_appears(known)
    await waiters.finish()


async def test_a_request_above_the_token_limit_is_taken_while_nobody_waits():
    queue = PairingQueue(registry(), max_waiting_tokens=49)
    # To come again later would not help it.
    queue.admit(queue.place(NEED), NEED, remaining_s=60)


async def test_a_deadline_that_the_prediction_does_not_meet_is_refused_with_it():
    known = registry()
    # 1000 ms ahead at 1 ms per token, and 30 ms of its own.
    known.nodes["p0"].queued_tokens = 1000
    queue = PairingQueue(known)
    queue.admit(queue.place(NEED), NEED, remaining_s=1.03)
    with pytest.raises(ServingError) as error:
        queue.admit(queue.place(NEED), NEED, remaining_s=1.02)
    assert error.value.reason is Reason.DEADLINE_UNREACHABLE
    assert error.value.metadata == {"predicted_s": "1.030", "remaining_s": "1.020"}
    assert error.value.retry_after_s == pytest.approx(0.01)


async def test_a_first_token_is_predicted_from_the_nodes_and_who_is_ahead_in_line():
    known = registry(**FULL)
    queue = PairingQueue(known)
    waiters = Waiters(queue)
    await waiters.join("urgent", priority=1)
    for name in ("a", "b"):
        await waiters.join(name)

    def predicted_ms(priority: int) -> float:
        return queue.predicted_first_token_s(queue.place(NEED, priority=priority), NEED) * 1e3

    # 30 ms each: of those ahead, and its own.
    assert [predicted_ms(priority) for priority in (0, 1, 2)] == pytest.approx([120, 60, 30])
    # Two nodes work off what waits, and the one with less to do takes the request.
    known.register(node("p1", queued_tokens=20, max_model_len=9999))
    known.nodes["p0"].queued_tokens = 50
    assert predicted_ms(0) == pytest.approx(20 + 45 + 30)
    for name in ("p0", "p1"):
        known.remove(known.nodes[name])
    # Then the decode node does all of it.
    assert predicted_ms(0) == pytest.approx(90 + 30)
    room_appears(known)
    await waiters.finish()


async def test_nothing_is_predicted_of_nodes_that_are_not_there():
    queue = PairingQueue(Registry())
    assert queue.predicted_first_token_s(queue.place(NEED), NEED) == 0.0
    queue.admit(queue.place(NEED), NEED, remaining_s=0.0)
