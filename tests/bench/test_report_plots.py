"""What plots and tables are made of: curves, spans, marks and colours, without drawing any."""

import pytest

from bench.figures import GOODPUT
from bench.records import RequestRecord
from bench.report.gaps_over_time import long_spans_s, timed_gaps_ms
from bench.report.latency_cdf import curve
from bench.report.look import looks
from bench.report.side_by_side import best_beyond
from bench.verdict import Figure

LATENCY = Figure(name="itl_p99_ms", title="ITL p99")


def request(index: int, *, gap_s: float, num_input: int = 64, label: str = "") -> RequestRecord:
    """First token after 250 ms, then three more, each gap_s later."""
    return RequestRecord(
        index=index,
        offered_s=0.0,
        sent_s=0.001,
        num_input=num_input,
        num_output=4,
        label=label,
        chunks=tuple((0.25 + number * gap_s, 1) for number in range(4)),
    )


def test_a_curve_ends_at_the_share_that_one_more_would_exceed() -> None:
    # Nine values: the fifth has half of ten below or at it, the ninth nine tenths.
    xs, ys = curve([30.0, 10.0, 20.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0])
    assert xs == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0]
    assert ys[4] == pytest.approx(0.30103, abs=1e-5)
    assert ys[8] == pytest.approx(1.0)


def test_a_curve_of_many_values_keeps_all_of_its_tail() -> None:
    xs, _ = curve([float(value) for value in range(1, 100_001)])
    assert xs[-500:] == [float(value) for value in range(99_501, 100_001)]
    assert len(xs) <= 1100


def test_gaps_are_at_the_time_when_they_ended() -> None:
    assert timed_gaps_ms([request(0, gap_s=0.5)]) == [(0.75, 500.0), (1.25, 500.0), (1.75, 500.0)]


def test_long_prompts_are_those_labelled_else_those_far_above_the_median() -> None:
    labelled = [request(0, gap_s=0.1), request(1, gap_s=0.1, label="long")]
    assert long_spans_s(labelled) == [(0.001, 0.25)]
    by_length = [request(0, gap_s=0.1), request(1, gap_s=0.1), request(2, gap_s=0.1, num_input=600)]
    assert len(long_spans_s(by_length)) == 1
    assert long_spans_s([request(0, gap_s=0.1), request(1, gap_s=0.1, num_input=500)]) == []


@pytest.mark.parametrize(
    ("values", "band", "best"),
    [
        ({"a": 10.0, "b": 12.0}, 0.1, "a"),
        ({"a": 10.0, "b": 10.9}, 0.1, None),
        ({"a": 10.0, "b": 12.0}, None, None),
        ({"a": 10.0, "b": None}, 0.1, None),
    ],
)
def test_the_best_is_marked_only_beyond_the_band(
    values: dict[str, float | None], band: float | None, best: str | None
) -> None:
    assert best_beyond(values, figure=LATENCY, band=band) == best


def test_a_difference_is_best_beyond_the_band_in_its_own_unit() -> None:
    assert best_beyond({"a": 3.0, "b": 3.4}, figure=GOODPUT, band=0.3) == "b"
    assert best_beyond({"a": 3.0, "b": 3.2}, figure=GOODPUT, band=0.3) is None


def test_a_deployment_has_one_colour_wherever_it_is_shown() -> None:
    alone, together = (
        looks(["colocated 1x2"]),
        looks(["1P1D", "colocated 2x1", "colocated 1x2", "http://peer"]),
    )
    assert alone["colocated 1x2"] == together["colocated 1x2"]
    assert len({(look.colour, look.dash) for look in together.values()}) == 4
