import json

import pytest

from bench.measures import dist, measure
from bench.records import RequestRecord
from bench.slo import Slo, attainment


def record(index: int = 0, **fields: object) -> RequestRecord:
    """Offered and sent at 0, ten tokens in, three out."""
    given = {"offered_s": 0.0, "sent_s": 0.0, "num_input": 10, "num_output": 3, **fields}
    return RequestRecord(index=index, **given)


# Gaps of 60 and 140 ms.
SERVED = record(
    chunks=((0.1, 1), (0.16, 1), (0.3, 1)),
    ended_s=0.4,
    queue_s=0.01,
    transfer_s=0.02,
    handoff_gap_s=0.06,
    served_as="disaggregated",
    num_cached=4,
)
# One chunk: two gaps that are nothing.
MERGED = record(1, chunks=((0.2, 3),), ended_s=0.2, served_as="local")
REFUSED = record(2, outcome="refused", ended_s=0.01)
FAILED = record(3, outcome="failed", chunks=((0.3, 1),), ended_s=0.5)
RECORDS = [SERVED, MERGED, REFUSED, FAILED]


def test_percentiles_lie_between_the_values_that_occurred():
    found = dist([0.0, 10.0, 20.0, 30.0, 40.0])
    # p90 of five values is 0.9 * 4 = 3.6 of the way.
    assert (found.p50, found.p90, found.max, found.mean, found.count) == (20, 36, 40, 20, 5)
    assert found.p999 == pytest.approx(39.96)
    assert dist([]) is None


def test_the_figures_of_four_requests():
    found = measure(RECORDS, wall_s=2.0)
    assert found.num_offered == 4
    assert found.outcomes == {"ok": 2, "refused": 1, "failed": 1, "unfinished": 0}
    assert found.served_as == {"disaggregated": 1, "local": 1}
    # Of all that got a token: 100, 200, 300.
    assert found.ttft_ms.p50 == pytest.approx(200)
    assert found.ttft_ms.count == 3
    # 60, 140, 0, 0.
    assert found.itl_ms.count == 4
    assert found.itl_ms.max == pytest.approx(140)
    assert (found.num_gaps_over_50ms, found.num_gaps_over_100ms) == (2, 1)
    # Of the served: 100 and 0; 400 and 200.
    assert found.tpot_ms.mean == pytest.approx(50)
    assert found.e2e_ms.mean == pytest.approx(300)
    assert found.queue_ms.p50 == pytest.approx(10)
    assert found.transfer_ms.p50 == pytest.approx(20)
    assert found.handoff_gap_ms.p50 == pytest.approx(60)
    # Seven tokens in two seconds, and the prompts of the three that got one.
    assert found.output_tok_s == 3.5
    assert found.total_tok_s == (7 + 30) / 2
    # Seven tokens in five chunks; 4 cached of the 20 prompt tokens that were served.
    assert found.tokens_per_chunk == 1.4
    assert found.cached_share == 0.2


def test_figures_become_json():
    assert json.loads(json.dumps(measure(RECORDS, wall_s=2.0).to_dict()))["ttft_ms"]["count"] == 3


def test_a_run_without_requests_has_no_figures():
    found = measure([], wall_s=0.0)
    assert found.ttft_ms is None
    assert found.output_tok_s == 0.0


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        # TTFT 100 ms, TPOT 100 ms, p99 of the gaps 60 and 140 is 139.2 ms.
        (Slo(ttft_ms=100.1, tpot_ms=100.1), True),
        (Slo(ttft_ms=99, tpot_ms=101), False),
        (Slo(ttft_ms=101, tpot_ms=99), False),
        (Slo(ttft_ms=101, tpot_ms=101, itl_p99_ms=139.3), True),
        (Slo(ttft_ms=101, tpot_ms=101, itl_p99_ms=139.1), False),
    ],
)
def test_a_request_keeps_every_bound_or_misses(slo, is_met):
    assert slo.is_met(SERVED) is is_met


def test_refused_failed_and_late_requests_count_as_misses():
    slo = Slo(ttft_ms=250, tpot_ms=1000)
    late = record(4, sent_s=0.2, offered_s=0.0, chunks=((0.26, 3),), ended_s=0.3)
    assert attainment([SERVED, MERGED, REFUSED, FAILED, late], slo) == 2 / 5
    assert attainment([], slo) == 0.0


def test_one_token_has_no_tpot_to_miss():
    assert Slo(ttft_ms=200, tpot_ms=0.0).is_met(record(num_output=1, chunks=((0.1, 1),)))
