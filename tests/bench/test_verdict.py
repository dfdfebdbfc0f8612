import numpy as np
import pytest

from bench.run_log import LoggedRun, append_run, pairs_of, read_runs
from bench.verdict import (
    BETTER,
    CANNOT_TELL,
    COLOCATE,
    DISAGGREGATE,
    WORSE,
    Figure,
    Finding,
    decide,
    explain,
    find,
)
from bench.verdict_check import check

TTFT = Figure(name="ttft_p50_ms", title="TTFT p50")
RATE = Figure(name="tok_s", title="output tok/s", unit="tok/s", is_lower_better=False)
ATTAINMENT = Figure(
    name="attainment", title="SLO attainment", is_lower_better=False, is_difference=True
)
SAME = [(1.00, 1.01), (1.02, 1.00), (1.00, 1.00), (0.99, 1.00), (1.01, 1.00)]
SAME_SHARE = [(0.90, 0.91), (0.92, 0.91), (0.95, 0.95), (0.93, 0.92), (0.90, 0.91)]


def noisy_pairs(
    *, num: int, drift: float, noise: float, slower: float = 1.0, seed: int = 0
) -> list[tuple[float, float]]:
    """Runs of 100 ms: drift is shared by a pair, noise is each run's own."""
    rng = np.random.default_rng(seed)
    level = 100 * np.exp(rng.normal(0, drift, (num, 1)))
    pairs = level * np.exp(rng.normal(0, noise, (num, 2))) * [slower, 1.0]
    return [(float(a), float(b)) for a, b in pairs]


@pytest.mark.parametrize("figure", [TTFT, RATE])
@pytest.mark.parametrize(("drift", "noise"), [(0.03, 0.02), (0.06, 0.02), (0.06, 0.04)])
def test_both_rates_of_right_words_are_at_least_95_percent(
    figure: Figure, drift: float, noise: float
) -> None:
    rates = check(figure, noisy_pairs(num=10, drift=drift, noise=noise), seed=0, num=100)
    assert rates is not None
    assert rates.equal_is_cannot_tell >= 0.95
    assert rates.slower_is_worse >= 0.95


def test_fresh_pairs_of_equal_servers_cannot_be_told_and_slower_ones_are_found() -> None:
    num_equal = num_slower = 0
    for trial in range(200):
        same = noisy_pairs(num=10, drift=0.05, noise=0.03, seed=3 * trial)
        equal = noisy_pairs(num=10, drift=0.05, noise=0.03, seed=3 * trial + 1)
        slower = noisy_pairs(num=10, drift=0.05, noise=0.03, seed=3 * trial + 2, slower=1.2)
        words = [
            find(TTFT, rival="B", same=same, pairs=pairs, num_resamples=500).word
            for pairs in (equal, slower)
        ]
        num_equal += words[0] == CANNOT_TELL
        num_slower += words[1] == WORSE
    assert num_equal >= 190
    assert num_slower >= 190


def test_a_figure_that_scatters_too_much_is_not_trusted() -> None:
    rates = check(TTFT, noisy_pairs(num=10, drift=0.05, noise=0.4), seed=0, num=50)
    assert rates is not None
    assert not rates.is_trusted


def test_a_higher_rate_is_better_and_a_higher_latency_is_worse() -> None:
    faster = [(1.3, 1.0)] * 5
    assert find(TTFT, rival="B", same=SAME, pairs=faster).word == WORSE
    found = find(RATE, rival="B", same=SAME, pairs=faster)
    assert found.word == BETTER
    assert found.effect == pytest.approx(1.3)


def test_a_small_effect_within_the_band_cannot_be_told_however_steady_it_is() -> None:
    # Every pair says 0.5 %, but A/A differs by as much.
    assert find(TTFT, rival="B", same=SAME, pairs=[(1.005, 1.0)] * 9).word == CANNOT_TELL


def test_shares_are_compared_by_difference_also_at_nought() -> None:
    found = find(ATTAINMENT, rival="B", same=SAME_SHARE, pairs=[(0.5, 0.0)] * 5)
    assert (found.word, found.effect) == (BETTER, pytest.approx(0.5))


def test_four_pairs_are_too_few_for_a_word() -> None:
    found = find(TTFT, rival="B", same=SAME, pairs=[(2.0, 1.0)] * 4)
    assert (found.word, found.effect, found.num_pairs) == (CANNOT_TELL, None, 4)


def test_runs_without_the_figure_make_no_pair() -> None:
    pairs = [(None, 1.0), *[(2.0, 1.0)] * 4]
    assert find(TTFT, rival="B", same=SAME, pairs=pairs).num_pairs == 4


def word(text: str, *, rival: str = "colocated 1x2") -> Finding:
    return Finding(figure=ATTAINMENT, rival=rival, word=text, num_pairs=10)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ((BETTER, BETTER), DISAGGREGATE),
        ((BETTER, CANNOT_TELL), CANNOT_TELL),
        ((BETTER, WORSE), COLOCATE),
        ((CANNOT_TELL, WORSE), COLOCATE),
        ((CANNOT_TELL, CANNOT_TELL), CANNOT_TELL),
        ((), CANNOT_TELL),
    ],
)
def test_disaggregating_must_beat_every_colocated_baseline(
    words: tuple[str, ...], verdict: str
) -> None:
    assert decide({str(i): word(text) for i, text in enumerate(words)}) == verdict


def test_the_verdict_names_the_slo_and_the_figure() -> None:
    sentence = explain(
        DISAGGREGATE, {"colocated 1x2": word(BETTER)}, candidate="1P1D", slo="TTFT 400 ms"
    )
    assert sentence == (
        "disaggregate, for TTFT 400 ms: SLO attainment of 1P1D against "
        "colocated 1x2: better (10 pairs)"
    )


def test_pairs_are_runs_of_one_round(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for phase, number, name, value in (
        ("aa", 0, "A", 1.0), ("aa", 0, "A again", 2.0), ("aa", 1, "A again", 4.0),
        ("aa", 1, "A", 3.0), ("ab", 0, "A", 5.0), ("ab", 0, "B", 6.0), ("ab", 1, "A", 7.0),
    ):  # fmt: skip
        figures = {"ttft_p50_ms": value}
        append_run(tmp_path, LoggedRun(phase=phase, round=number, name=name, figures=figures))
    runs = read_runs(tmp_path)
    assert pairs_of(TTFT, runs, phase="aa") == [(1.0, 2.0), (3.0, 4.0)]
    assert pairs_of(TTFT, runs, phase="ab", candidate="B", rival="A") == [(6.0, 5.0)]
    with pytest.raises(ValueError, match="holds no runs"):
        read_runs(tmp_path / "absent")
