import pytest

from bench.ratio import RatioPoint, advice


def point(name: str, goodput_rps: float, predicted_rps: float | None = None) -> RatioPoint:
    return RatioPoint(
        name=name,
        num_prefill=1,
        num_decode=3,
        goodput_rps=goodput_rps,
        predicted_rps=predicted_rps,
    )


def test_the_best_split_and_the_next_are_named() -> None:
    points = [point("colocated 4x1", 6.4), point("2P2D", 9.9), point("1P3D", 5.6)]
    assert advice(points) == ("2P2D is best with 9.9 requests/s; then colocated 4x1 with 6.4")


def test_a_single_split_has_no_next_one() -> None:
    assert advice([point("1P1D", 3.25)]) == "1P1D: 3.25 requests/s"


def test_no_goodput_anywhere_is_said() -> None:
    assert advice([point("1P1D", 0.0), point("colocated 2x1", 0.0)]) == (
        "no split meets the SLO at any rate that was tried"
    )


def test_the_error_of_a_prediction_is_relative_to_what_was_measured() -> None:
    assert point("1P3D", 4.0, 5.0).error == pytest.approx(0.25)
    assert point("1P3D", 4.0).error is None
    assert point("1P3D", 0.0, 5.0).error is None
