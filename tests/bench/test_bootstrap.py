import math

import numpy as np
import pytest

from bench.bootstrap import differences, expanded_tail, log_ratios, mean_interval, student_t


def test_pairs_become_effects_without_what_both_share() -> None:
    # 20 % slower in both pairs, though the second pair ran on a machine half as fast.
    assert log_ratios([12.0, 24.0], [10.0, 20.0]) == pytest.approx([math.log(1.2)] * 2)
    assert differences([0.5, 1.0], [0.25, 1.0]) == [0.25, 0.0]


def test_equal_effects_have_an_interval_of_no_width() -> None:
    interval = mean_interval([0.1] * 6, seed=0)
    assert (interval.low, interval.high) == pytest.approx((0.1, 0.1))
    assert interval.reach == pytest.approx(0.1)


def test_the_same_seed_gives_the_same_interval() -> None:
    effects = [0.011, -0.023, 0.031, 0.004, -0.017, 0.029]
    assert mean_interval(effects, seed=7) == mean_interval(effects, seed=7)
    assert mean_interval(effects, seed=7) != mean_interval(effects, seed=8)


def test_one_pair_has_no_interval() -> None:
    with pytest.raises(ValueError, match="1 pairs have no interval"):
        mean_interval([0.1], seed=0)


@pytest.mark.parametrize(("num_free", "table"), [(4, 2.776), (9, 2.262), (30, 2.042)])
def test_student_t_is_that_of_the_tables(num_free: int, table: float) -> None:
    assert student_t(0.975, num_free) == pytest.approx(table, rel=0.01)


def test_the_tail_shrinks_to_the_nominal_one_with_many_pairs() -> None:
    assert expanded_tail(10_000, confidence=0.95) == pytest.approx(0.025, rel=0.01)
    # t 2.262 and sqrt(10 / 9): 2.384 standard deviations, of which the normal tail is 0.0086.
    assert expanded_tail(10, confidence=0.95) == pytest.approx(0.0086, rel=0.03)


def test_the_interval_of_ten_pairs_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    intervals = [
        mean_interval(rng.normal(0.05, 0.03, 10).tolist(), seed=seed, num_resamples=1000)
        for seed in range(1000)
    ]
    share = sum(one.low <= 0.05 <= one.high for one in intervals) / len(intervals)
    assert 0.93 <= share <= 0.97
