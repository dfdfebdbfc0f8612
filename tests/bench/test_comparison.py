import json

import pytest

from bench.comparison import conclude, medians
from bench.rounds import rotated, round_seed
from bench.run_log import LoggedRun

SPLIT, TWIN, WHOLE, PEER = "1P1D", "1P1D again", "colocated 1x2", "http://peer"


def run(phase: str, number: int, name: str, **figures: float) -> LoggedRun:
    return LoggedRun(phase=phase, round=number, name=name, figures=figures)


def runs(*, split: float, whole: float, peer: float) -> list[LoggedRun]:
    """Ten rounds of attainment, with a wobble of 1 % that A/A has too; ITL p99 is its inverse."""
    found = []
    for number in range(10):
        wobble = 0.01 * (-1) ** number
        for phase, name, share in (
            ("aa", SPLIT, 0.8), ("aa", TWIN, 0.8 + wobble),
            ("ab", SPLIT, split), ("ab", WHOLE, whole + wobble), ("ab", PEER, peer),
        ):  # fmt: skip
            found.append(run(phase, number, name, attainment=share, itl_p99_ms=10 / share))
    return found


@pytest.mark.parametrize(
    ("split", "whole", "verdict"),
    [(0.95, 0.7, "disaggregate"), (0.7, 0.95, "colocate"), (0.8, 0.8, "cannot tell")],
)
def test_attainment_against_the_colocated_baseline_decides(
    split: float, whole: float, verdict: str
) -> None:
    comparison = conclude(
        runs(split=split, whole=whole, peer=0.5),
        candidate=SPLIT,
        colocated=[WHOLE],
        slo="TTFT 400 ms",
    )
    assert comparison.verdict == verdict
    assert comparison.sentence.startswith(f"{verdict}, for TTFT 400 ms: SLO attainment of 1P1D")


def test_a_peer_is_reported_and_has_no_say() -> None:
    comparison = conclude(
        runs(split=0.9, whole=0.7, peer=1.0), candidate=SPLIT, colocated=[WHOLE], slo="TTFT 400 ms"
    )
    assert comparison.verdict == "disaggregate"
    words = {found.figure.name: found.word for found in comparison.findings[PEER]}
    assert words == {"attainment": "worse", "itl_p99_ms": "worse"}


def test_when_all_meet_the_slo_it_says_to_ask_at_a_higher_rate() -> None:
    comparison = conclude(
        runs(split=1.0, whole=1.0, peer=1.0), candidate=SPLIT, colocated=[WHOLE], slo="TTFT 400 ms"
    )
    assert comparison.verdict == "cannot tell"
    assert comparison.sentence.endswith("a higher rate may tell")


def test_goodput_decides_where_it_was_measured() -> None:
    measured = [
        run(phase, number, name, attainment=0.9, goodput_rps=goodput)
        for number in range(6)
        for phase, name, goodput in (
            ("aa", SPLIT, 3.0), ("aa", TWIN, 3.0), ("ab", SPLIT, 3.0), ("ab", WHOLE, 2.0)
        )
    ]  # fmt: skip
    comparison = conclude(measured, candidate=SPLIT, colocated=[WHOLE], slo="TTFT 400 ms")
    assert comparison.sentence == (
        "disaggregate, for TTFT 400 ms: goodput of 1P1D against colocated 1x2: +1 (+1 to +1) better"
    )


def test_it_can_be_written_as_json() -> None:
    comparison = conclude(
        runs(split=0.9, whole=0.7, peer=1.0), candidate=SPLIT, colocated=[WHOLE], slo="TTFT 400 ms"
    )
    fields = json.loads(json.dumps(comparison.to_dict()))
    assert fields["verdict"] == "disaggregate"
    assert [found["figure"] for found in fields["findings"][WHOLE]] == ["attainment", "itl_p99_ms"]
    assert fields["medians"][PEER] == {"attainment": 1.0, "itl_p99_ms": 10.0}


def test_medians_are_of_the_second_phase() -> None:
    found = medians([run("aa", 0, SPLIT, e2e_p50_ms=9.0), run("ab", 0, SPLIT, e2e_p50_ms=1.0),
                     run("ab", 1, SPLIT, e2e_p50_ms=2.0)])  # fmt: skip
    assert found == {SPLIT: {"e2e_p50_ms": 1.5}}


def test_each_round_begins_with_the_next_one() -> None:
    assert [rotated(["A", "B", "C"], number) for number in range(4)] == [  # type: ignore[list-item]
        ["A", "B", "C"],
        ["B", "C", "A"],
        ["C", "A", "B"],
        ["A", "B", "C"],
    ]


def test_no_two_rounds_share_a_seed() -> None:
    seeds = [round_seed(s, phase, n) for s in (0, 1) for phase in ("aa", "ab") for n in range(50)]
    assert len(set(seeds)) == len(seeds)
