"""Whose turn it is: priority, then shares of tokens, then age; and that nobody waits for ever."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.fair_line import QUANTUM_TOKENS, FairLine, Place

HALF = QUANTUM_TOKENS // 2


def served(line: FairLine[str]) -> list[str]:
    """All in the order of their turns; asking twice changes nothing."""
    order = []
    while (first := line.first()) is not None:
        assert line.first() == first
        line.take(first[0])
        order.append(first[1])
    assert (len(line), line.num_tokens) == (0, 0)
    return order


def test_an_empty_line_has_nobody_first():
    assert FairLine[str]().first() is None


def test_a_tenants_requests_go_by_age_however_large_they_are():
    line: FairLine[str] = FairLine()
    for arrival, num_tokens in ((3, 1), (1, 9 * QUANTUM_TOKENS), (2, 1)):
        line.add(Place(arrival=arrival, num_tokens=num_tokens), f"r{arrival}")
    assert served(line) == ["r1", "r2", "r3"]


def test_higher_priority_goes_first_whoever_asks():
    line: FairLine[str] = FairLine(weights={"large": 100.0})
    line.add(Place(arrival=0, priority=-1, tenant="large", num_tokens=1), "low")
    line.add(Place(arrival=1, tenant="large", num_tokens=1), "middle")
    line.add(Place(arrival=2, priority=7, tenant="small", num_tokens=9 * QUANTUM_TOKENS), "high")
    assert served(line) == ["high", "middle", "low"]


def test_a_flood_delays_another_tenant_by_a_turn_and_not_by_its_length():
    line: FairLine[str] = FairLine()
    for index in range(6):
        line.add(Place(arrival=index, tenant="flood", num_tokens=HALF), f"f{index}")
    line.add(Place(arrival=6, tenant="calm", num_tokens=HALF), "c0")
    line.add(Place(arrival=7, tenant="calm", num_tokens=HALF), "c1")
    assert served(line) == ["f0", "f1", "c0", "c1", "f2", "f3", "f4", "f5"]


def test_turns_go_round_in_the_order_in_which_tenants_came():
    line: FairLine[str] = FairLine()
    for index in range(6):
        tenant = "cab"[index % 3]
        place = Place(arrival=index, tenant=tenant, num_tokens=QUANTUM_TOKENS)
        line.add(place, f"{tenant}{index // 3}")
    assert served(line) == ["c0", "a0", "b0", "c1", "a1", "b1"]


def test_credit_that_a_turn_leaves_counts_in_the_next():
    # Of 1024: 700 and 324 left; then 1348, which is 700 and 648 left; then 1672, which is two.
    line: FairLine[str] = FairLine()
    for index in range(4):
        line.add(Place(arrival=index, tenant="a", num_tokens=700), f"a{index}")
        line.add(Place(arrival=index + 10, tenant="b", num_tokens=QUANTUM_TOKENS), f"b{index}")
    assert served(line) == ["a0", "b0", "a1", "b1", "a2", "a3", "b2", "b3"]


def test_a_request_of_several_turns_waits_for_them():
    line: FairLine[str] = FairLine()
    line.add(Place(arrival=0, tenant="long", num_tokens=3 * QUANTUM_TOKENS), "long")
    for index in range(4):
        line.add(Place(arrival=1 + index, tenant="short", num_tokens=QUANTUM_TOKENS), f"s{index}")
    assert served(line) == ["s0", "s1", "long", "s2", "s3"]


def test_a_weight_is_a_share():
    line: FairLine[str] = FairLine(weights={"a": 2.0})
    for index in range(4):
        line.add(Place(arrival=index, tenant="a", num_tokens=QUANTUM_TOKENS), f"a{index}")
        line.add(Place(arrival=9 + index, tenant="b", num_tokens=QUANTUM_TOKENS), f"b{index}")
    assert served(line) == ["a0", "a1", "b0", "a2", "a3", "b1", "b2", "b3"]


def test_a_weight_below_one_takes_several_turns():
    line: FairLine[str] = FairLine(weights={"a": 0.5})
    for index in range(3):
        line.add(Place(arrival=index, tenant="a", num_tokens=QUANTUM_TOKENS), f"a{index}")
        line.add(Place(arrival=9 + index, tenant="b", num_tokens=QUANTUM_TOKENS), f"b{index}")
    assert served(line) == ["b0", "a0", "b1", "b2", "a1", "a2"]


def test_a_request_that_comes_back_goes_before_its_tenants_later_ones():
    line: FairLine[str] = FairLine()
    back = Place(arrival=2, num_tokens=1)
    line.add(back, "first time")
    line.add(Place(arrival=5, num_tokens=1), "later")
    line.add(Place(arrival=9, priority=1, num_tokens=1), "urgent")
    assert line.first() is not None
    line.take(Place(arrival=9, priority=1, num_tokens=1))
    line.take(back)
    line.add(back, "came back")
    assert served(line) == ["came back", "later"]


def test_who_leaves_does_not_pay():
    line: FairLine[str] = FairLine()
    gone = Place(arrival=0, tenant="a", num_tokens=QUANTUM_TOKENS)
    line.add(gone, "gone")
    line.add(Place(arrival=1, tenant="a", num_tokens=QUANTUM_TOKENS), "a")
    line.add(Place(arrival=2, tenant="b", num_tokens=QUANTUM_TOKENS), "b")
    line.leave(gone)
    assert served(line) == ["a", "b"]


def test_the_turn_passes_on_when_its_owner_leaves_the_line():
    line: FairLine[str] = FairLine()
    gone = Place(arrival=0, tenant="a", num_tokens=1)
    line.add(gone, "gone")
    line.add(Place(arrival=1, tenant="b", num_tokens=QUANTUM_TOKENS), "b")
    line.add(Place(arrival=2, tenant="c", num_tokens=QUANTUM_TOKENS), "c")
    line.leave(gone)
    assert served(line) == ["b", "c"]


def test_a_tenant_that_leaves_out_of_turn_gives_nobody_a_turn():
    line: FairLine[str] = FairLine()
    for index in range(2):
        line.add(Place(arrival=index, tenant="a", num_tokens=QUANTUM_TOKENS), f"a{index}")
    line.add(Place(arrival=2, tenant="b", num_tokens=QUANTUM_TOKENS), "b")
    gone = Place(arrival=3, tenant="c", num_tokens=1)
    line.add(gone, "gone")
    line.leave(gone)
    assert served(line) == ["a0", "b", "a1"]


def test_credit_is_not_saved_up_while_nobody_waits():
    line: FairLine[str] = FairLine()
    huge = Place(arrival=0, tenant="a", num_tokens=9 * QUANTUM_TOKENS)
    line.add(huge, "huge")
    # Nine turns of credit, but no room.
    assert line.first() == (huge, "huge")
    line.leave(huge)
    line.add(Place(arrival=1, tenant="b", num_tokens=QUANTUM_TOKENS), "b")
    for index in range(2):
        line.add(Place(arrival=2 + index, tenant="a", num_tokens=QUANTUM_TOKENS), f"a{index}")
    line.add(Place(arrival=4, tenant="b", num_tokens=QUANTUM_TOKENS), "b1")
    assert served(line) == ["b", "a0", "b1", "a1"]


def test_the_line_counts_who_waits_and_what_they_cost():
    line: FairLine[str] = FairLine()
    places = [
        Place(arrival=0, tenant="a", num_tokens=5),
        Place(arrival=1, tenant="b", num_tokens=7),
        Place(arrival=2, tenant="a", priority=3, num_tokens=11),
    ]
    assert places[0] not in line
    for place, item in zip(places, "xyz", strict=True):
        line.add(place, item)
    assert (len(line), line.num_tokens) == (3, 23)
    assert sorted(line.items()) == list(zip(places, "xyz", strict=True))
    assert all(place in line for place in places)
    line.take(places[2])
    line.leave(places[0])
    assert [place in line for place in places] == [False, True, False]
    assert (len(line), line.num_tokens, list(line.items())) == (1, 7, [(places[1], "y")])


@pytest.mark.parametrize("again", ["take", "leave"])
def test_who_does_not_wait_cannot_go(again):
    line: FairLine[str] = FairLine()
    place = Place(arrival=0, num_tokens=5)
    line.add(place, "x")
    line.add(Place(arrival=1, num_tokens=7), "y")
    line.take(place)
    with pytest.raises((KeyError, ValueError)):
        getattr(line, again)(place)
    assert (len(line), line.num_tokens) == (1, 7)


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}
MAX_COST = 2 * QUANTUM_TOKENS
COMES = st.tuples(st.sampled_from("abcd"), st.integers(1, MAX_COST))
SERVE, LEAVE = st.just("serve"), st.tuples(st.just("leave"), st.integers(0, 99))


def most_skipped(tenant: str) -> float:
    """Tokens that others can be served while tenant's next request waits.

    It has its turn after as many quanta as it costs. Until then each other has as many turns, and
    what it had saved: less than a request.
    """
    num_turns = math.ceil(MAX_COST / (QUANTUM_TOKENS * WEIGHTS[tenant]))
    others = [weight for name, weight in WEIGHTS.items() if name != tenant]
    return sum(num_turns * QUANTUM_TOKENS * weight + MAX_COST for weight in others)


@given(st.lists(st.one_of(COMES, COMES, SERVE, LEAVE), max_size=120))
def test_everybody_is_served_once_in_order_and_within_the_others_turns(steps):
    line: FairLine[int] = FairLine(weights=WEIGHTS)
    waiting: dict[str, list[Place]] = {name: [] for name in WEIGHTS}
    skipped = dict.fromkeys(WEIGHTS, 0)

    def check() -> None:
        places = [place for places in waiting.values() for place in places]
        assert len(line) == len(places)
        assert line.num_tokens == sum(place.num_tokens for place in places)
        assert sorted(line.items()) == sorted((place, place.arrival) for place in places)

    def serve() -> None:
        first = line.first()
        if first is None:
            assert not any(waiting.values())
            return
        place, item = first
        assert item == place.arrival
        # The oldest of its tenant, which waits: nobody is served twice or out of order.
        assert waiting[place.tenant].pop(0) == place
        line.take(place)
        skipped[place.tenant] = 0
        for name, places in waiting.items():
            if places and name != place.tenant:
                skipped[name] += place.num_tokens
                assert skipped[name] <= most_skipped(name)

    for arrival, step in enumerate(steps):
        match step:
            case "serve":
                serve()
            case ("leave", index):
                places = sorted(place for places in waiting.values() for place in places)
                if places:
                    gone = places[index % len(places)]
                    line.leave(gone)
                    skipped[gone.tenant] = 0
                    waiting[gone.tenant].remove(gone)
            case (tenant, num_tokens):
                place = Place(arrival=arrival, tenant=tenant, num_tokens=num_tokens)
                if not waiting[tenant]:
                    skipped[tenant] = 0
                line.add(place, arrival)
                waiting[tenant].append(place)
        check()
    while any(waiting.values()):
        serve()
    check()
