import random
from itertools import pairwise

import pytest

from bench.arrivals import arrival_times, make_workload, retimed
from bench.lengths import Fixed, parse_lengths
from bench.prompts import Prompts, ordinary_tokens, with_prompts
from bench.recipe import Recipe
from bench.workload import Arrival, Workload


def taken(times, number):
    return [next(times) for _ in range(number)]


def gaps_of(*, cv: float, number: int = 4000, rate_per_s: float = 5.0) -> list[float]:
    times = [0.0, *taken(arrival_times(rate_per_s, cv=cv, seed=1), number)]
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_deviation_that_were_asked_for(cv):
    gaps = gaps_of(cv=cv)
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    # The mean's own deviation is cv / 5 / sqrt(4000); five of them is a chance of one in a million.
    assert mean == pytest.approx(0.2, abs=5 * cv * 0.2 / 4000**0.5)
    # The sample cv of gamma gaps deviates by about cv * sqrt((1 + 2 cv^2) / 2n).
    assert deviation / mean == pytest.approx(cv, abs=5 * cv * ((1 + 2 * cv**2) / 8000) ** 0.5)


def test_half_of_all_poisson_gaps_are_below_the_exponential_median():
    # ln 2 / 5; the share's deviation is 0.5 / sqrt(4000) = 0.0079.
    below = sum(gap < 0.13863 for gap in gaps_of(cv=1.0)) / 4000
    assert below == pytest.approx(0.5, abs=5 * 0.0079)


def test_constant_arrivals_are_even():
    assert taken(arrival_times(4.0, cv=0, seed=0), 3) == [0.25, 0.5, 0.75]


def test_a_seed_repeats_and_another_differs():
    first, again, other = (taken(arrival_times(1, cv=1, seed=seed), 5) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_another_rate_asks_for_the_same_requests():
    slow, fast = (
        make_workload(
            arrival_times(rate, cv=1, seed=7),
            num_input=parse_lengths("uniform:1:1000"),
            num_output=Fixed(3),
            num_requests=50,
            seed=7,
        )
        for rate in (1.0, 4.0)
    )
    assert [a.num_input for a in slow.arrivals] == [a.num_input for a in fast.arrivals]
    for a, b in zip(slow.arrivals, fast.arrivals, strict=True):
        assert a.at_s == pytest.approx(4 * b.at_s)


def test_a_workload_ends_with_its_duration_or_its_requests():
    def made(**limits):
        times = arrival_times(10, cv=0, seed=0)
        return make_workload(times, num_input=Fixed(1), num_output=Fixed(1), seed=0, **limits)

    assert len(made(duration_s=1.05).arrivals) == 10
    assert len(made(duration_s=1.05, num_requests=4).arrivals) == 4
    with pytest.raises(ValueError, match="a number of requests or a duration"):
        made()


@pytest.mark.parametrize(("rate", "cv"), [(0, 1), (-1, 1), (1, -0.5)])
def test_impossible_arrivals_are_refused(rate, cv):
    with pytest.raises(ValueError, match="arrivals need"):
        arrival_times(rate, cv=cv, seed=0)


@pytest.mark.parametrize(
    "word", ["", "x", "0", "-1", "1.5", "uniform:5:4", "uniform:1", "lognormal:9:0", "lognormal:9"]
)
def test_a_word_that_is_no_length_is_refused(word):
    with pytest.raises(ValueError, match="is no length"):
        parse_lengths(word)


def test_lengths_are_drawn_from_what_the_word_says():
    rng = random.Random(3)
    assert {parse_lengths("7").draw(rng) for _ in range(9)} == {7}
    assert {parse_lengths("uniform:2:4").draw(rng) for _ in range(99)} == {2, 3, 4}
    drawn = sorted(parse_lengths("lognormal:200:0.8").draw(rng) for _ in range(4001))
    # The median's deviation is 1.25 * 0.8 / sqrt(4001) = 1.6 %.
    assert drawn[2000] == pytest.approx(200, rel=5 * 0.016)
    assert drawn[0] >= 1
    assert [str(parse_lengths(word)) for word in ("fixed:9", "uniform:2:4", "lognormal:5:0.5")] == [
        "9",
        "uniform:2:4",
        "lognormal:5:0.5",
    ]


# Two conversations of one system prompt, and one request without blocks.
BLOCKS = Workload(
    name="w",
    arrivals=(
        Arrival(at_s=0, num_input=1500, num_output=10, block_ids=(0, 1, 2), block_tokens=512),
        Arrival(at_s=2, num_input=1500, num_output=10, block_ids=(0, 3, 4), block_tokens=512),
        Arrival(at_s=4, num_input=2000, num_output=90, block_ids=(0, 1, 2, 5), block_tokens=512),
        Arrival(at_s=10, num_input=300, num_output=1),
    ),
)


def test_rate_and_duration():
    assert BLOCKS.duration_s == 10
    assert BLOCKS.rate_per_s == 0.3
    assert BLOCKS.scaled(4).rate_per_s == pytest.approx(1.2)
    assert BLOCKS.at_rate(3.0).duration_s == pytest.approx(1.0)
    assert Workload(name="", arrivals=()).rate_per_s == 0.0
    with pytest.raises(ValueError, match="has no rate"):
        BLOCKS.until(1).at_rate(1)


def test_limits_cut_lengths_and_the_end():
    cut = BLOCKS.limited(max_input=1600, max_output=50, max_requests=3)
    assert [(a.num_input, a.num_output) for a in cut.arrivals] == [
        (1500, 10),
        (1500, 10),
        (1600, 50),
    ]
    assert [a.at_s for a in BLOCKS.until(4).arrivals] == [0, 2]


def test_shorter_prompts_share_what_they_shared():
    short = BLOCKS.lengths_scaled(1 / 64)
    assert [a.num_input for a in short.arrivals] == [23, 23, 31, 5]
    assert [a.num_output for a in short.arrivals] == [1, 1, 1, 1]
    a, b, c, d = (list(p.prompt) for p in with_prompts(short, seed=5, vocab=range(10, 10_000)))
    assert [len(prompt) for prompt in (a, b, c, d)] == [23, 23, 31, 5]
    # Blocks are 8 tokens now: one shared by all, three by the first conversation (its 23 tokens).
    assert a[:8] == b[:8]
    assert a[8:16] != b[8:16]
    assert a == c[:23]


def test_prompts_are_other_ones_in_every_request_and_seed():
    def tokens(seed, index):
        arrival = Arrival(at_s=0, num_input=50, num_output=1)
        return list(Prompts(seed=seed, vocab=range(5, 105)).of(index, arrival))

    assert tokens(1, 1) == tokens(1, 1)
    assert tokens(1, 1) != tokens(1, 2)
    assert tokens(1, 1) != tokens(2, 1)
    assert set(tokens(1, 1)) <= set(range(5, 105))


def test_a_prompt_that_is_text_stays_text():
    arrival = Arrival(at_s=0, num_input=0, num_output=1, text="Hi")
    assert Prompts(seed=0).of(0, arrival) == "Hi"


def test_ordinary_tokens_leave_out_both_ends():
    assert ordinary_tokens(48_000) == range(1000, 47_000)
    assert ordinary_tokens(8) == range(8)


def test_a_sample_keeps_conversations_whole():
    for seed in range(20):
        kept = BLOCKS.sampled(0.5, random.Random(seed)).arrivals
        assert (BLOCKS.arrivals[0] in kept) == (BLOCKS.arrivals[2] in kept)
    assert BLOCKS.sampled(1.0, random.Random(0)) == BLOCKS


def test_a_sample_has_about_its_share():
    arrivals = tuple(Arrival(at_s=i, num_input=1, num_output=1) for i in range(4000))
    kept = Workload(name="", arrivals=arrivals).sampled(0.25, random.Random(1)).arrivals
    # The deviation is sqrt(4000 * 0.25 * 0.75) = 27.4.
    assert len(kept) == pytest.approx(1000, abs=5 * 27.4)


@pytest.mark.parametrize("share", [0, -0.1, 1.1])
def test_an_impossible_share_is_refused(share):
    with pytest.raises(ValueError, match="the share is"):
        BLOCKS.sampled(share, random.Random(0))


def test_a_recipe_shortens_and_speeds_up_a_trace():
    recipe = Recipe(
        num_input=Fixed(1),
        num_output=Fixed(1),
        trace=BLOCKS,
        speed=2.0,
        length_scale=0.5,
        max_input=800,
        duration_s=3.0,
    )
    assert [(a.at_s, a.num_input) for a in recipe.workload().arrivals] == [
        (0, 750),
        (1, 750),
        (2, 800),
    ]
    with pytest.raises(ValueError, match="either a rate or a speed"):
        recipe.at_rate(1.2).workload()


def test_a_trace_keeps_its_pattern_at_another_rate():
    recipe = Recipe(num_input=Fixed(1), num_output=Fixed(1), trace=BLOCKS, rate_per_s=1.2)
    # 0.3/s becomes 1.2/s, four times as fast.
    assert [a.at_s for a in recipe.workload().arrivals] == [0, 0.5, 1, 2.5]


def test_prompts_without_times_come_at_the_rate():
    texts = Workload(name="p", arrivals=(Arrival(at_s=0, num_input=0, num_output=2, text="a"),) * 3)
    recipe = Recipe(num_input=Fixed(1), num_output=Fixed(1), trace=texts, cv=0)
    with pytest.raises(ValueError, match="need a rate"):
        recipe.workload()
    assert [a.at_s for a in recipe.at_rate(2.0).workload().arrivals] == [0.5, 1.0, 1.5]
    assert retimed(texts, iter([1.0, 2.0])).duration_s == 2.0


def test_a_recipe_without_a_request_is_refused():
    recipe = Recipe(num_input=Fixed(1), num_output=Fixed(1), rate_per_s=1, cv=0, duration_s=0.5)
    with pytest.raises(ValueError, match="no request is left"):
        recipe.workload()
