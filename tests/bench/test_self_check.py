import asyncio
import time

import pytest

from bench.records import RequestRecord
from bench.self_check import Watch, judge

# Just inside of every bound.
GOOD = {
    "late_ms": [1.0] * 99 + [90.0],
    "lag_ms": [1.0] * 100,
    "cpu_shares": [0.2, 0.8],
    "cpu_share": 0.3,
    "num_open_files": 90,
    "open_file_limit": 100,
}


def test_a_client_within_all_bounds_is_valid():
    validity = judge(**GOOD)
    assert validity.is_valid
    assert validity.late_max_ms == 90.0
    assert validity.cpu_share_max == 0.8
    assert validity.to_dict()["is_valid"] is True


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"late_ms": [11.0] * 100}, "sent late, by 11 ms at p99"),
        ({"late_ms": [1.0] * 999 + [101.0]}, "and 101 ms at most"),
        ({"lag_ms": [11.0] * 100}, "loop lagged by 11 ms"),
        ({"cpu_shares": [0.1, 0.97]}, "0.97 of a core"),
        ({"num_open_files": 91}, "91 files open and may have 100"),
    ],
)
def test_each_bound_that_is_passed_is_a_reason_in_words(bad, words):
    validity = judge(**(GOOD | bad))
    assert not validity.is_valid
    assert len(validity.reasons) == 1
    assert words in validity.reasons[0]


async def test_a_client_that_computes_instead_of_listening_is_found_out():
    async with Watch() as watch:
        await asyncio.sleep(0)
        until = time.monotonic() + 1.1
        while time.monotonic() < until:
            pass
        await asyncio.sleep(0.03)
    late = RequestRecord(index=0, offered_s=0.0, sent_s=1.1, num_input=1, num_output=1)
    validity = watch.check([late])
    assert validity.lag_p99_ms > 500
    assert validity.late_p99_ms == pytest.approx(1100)
    # Its share of a core depends on who else runs here.
    assert len(validity.reasons) >= 2
    assert 0 < validity.num_open_files < validity.open_file_limit
