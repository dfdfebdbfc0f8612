import pytest

from bench.goodput import highest_rate, measure_goodput


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.3, 100.0])
def test_the_highest_rate_is_found_within_the_tolerance(limit):
    tried = []

    def holds(rate):
        tried.append(rate)
        return rate <= limit

    found = highest_rate(holds, start_per_s=1.0, tolerance=0.05)
    assert found <= limit
    assert found >= limit / 1.05
    assert len(tried) <= 15


def test_nothing_is_found_where_nothing_holds():
    assert highest_rate(lambda rate: False, start_per_s=8.0) == 0.0


async def test_a_measuring_function_is_asked_the_same_rates():
    asked = []

    async def holds(rate):
        asked.append(rate)
        return rate <= 5

    assert await measure_goodput(holds, start_per_s=2.0, tolerance=0.1) == 5.0
    # Doubled until it does not hold; then halves between 4 and 8, until they are 10 % apart.
    assert asked == [2, 4, 8, 6, 5, 5.5]
