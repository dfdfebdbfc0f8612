"""python -m bench.verdict_check FOLDER: whether verdicts can be trusted, on recorded A/A pairs.

    FOLDER/runs.jsonl of disagg bench compare --> its A/A pairs --resampled, many times-->
        as they are                 the right word is "cannot tell"
        one side 20 % slower        the right word is "worse"

For each resample one draw of the recorded pairs makes the band and another one is judged, the
sides of each pair swapped by chance. Prints the share of right words per figure; both should be
at least 95 %. A figure that scatters too much to find 20 % shows here, before anybody relies on it.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.figures import FIGURES
from bench.run_log import LoggedRun, pairs_of, read_runs
from bench.verdict import CANNOT_TELL, MIN_PAIRS, WORSE, Figure, find

PLANTED = 1.2
WANTED = 0.95
NUM_RESAMPLES = 500
# Of the bootstrap within each of them.
_NUM_INNER = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of right words over resamples of num_pairs recorded pairs."""

    num_pairs: int
    equal_is_cannot_tell: float
    slower_is_worse: float

    @property
    def is_trusted(self) -> bool:
        return min(self.equal_is_cannot_tell, self.slower_is_worse) >= WANTED


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.verdict_check")
    parser.add_argument("folder", type=Path, help="with the runs.jsonl of disagg bench compare")
    parser.add_argument("--resamples", type=int, default=NUM_RESAMPLES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    runs = read_runs(args.folder)
    print("| figure | A/A pairs | A/A: cannot tell | 20 % slower: found |")
    print("|--|--|--|--|")
    for figure in FIGURES:
        rates = check(figure, same_pairs(figure, runs), seed=args.seed, num=args.resamples)
        if rates is not None:
            print(
                f"| {figure.title} | {rates.num_pairs} | {rates.equal_is_cannot_tell:.1%} "
                f"| {rates.slower_is_worse:.1%} |"
            )


def same_pairs(figure: Figure, runs: Sequence[LoggedRun]) -> list[tuple[float, float]]:
    """The A/A pairs in which both runs have a figure above 0."""
    return [(a, b) for a, b in pairs_of(figure, runs, phase="aa") if a and b]


def check(
    figure: Figure, same: Sequence[tuple[float, float]], *, seed: int, num: int = NUM_RESAMPLES
) -> Rates | None:
    """None for what is compared by difference (a slowdown has no size there), or too few pairs."""
    if figure.is_difference or len(same) < MIN_PAIRS:
        return None
    rng = np.random.default_rng(seed)
    pairs = np.asarray(same, dtype=float)
    slower = PLANTED if figure.is_lower_better else 1 / PLANTED
    num_equal = num_slower = 0
    for _ in range(num):
        band, judged = _draw(pairs, rng), _draw(pairs, rng)
        inner_seed = int(rng.integers(2**31))
        num_equal += _word(figure, band, judged, inner_seed) == CANNOT_TELL
        num_slower += _word(figure, band, judged * [slower, 1.0], inner_seed) == WORSE
    return Rates(
        num_pairs=len(pairs),
        equal_is_cannot_tell=num_equal / num,
        slower_is_worse=num_slower / num,
    )


def _draw(pairs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    drawn = pairs[rng.integers(len(pairs), size=len(pairs))]
    swapped = rng.random(len(pairs)) < 0.5
    return np.where(swapped[:, None], drawn[:, ::-1], drawn)


def _word(figure: Figure, same: np.ndarray, pairs: np.ndarray, seed: int) -> str:
    found = find(
        figure,
        rival="itself",
        same=_tuples(same),
        pairs=_tuples(pairs),
        seed=seed,
        num_resamples=_NUM_INNER,
    )
    return found.word


def _tuples(pairs: Iterable[Sequence[float]]) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in pairs]


if __name__ == "__main__":
    main()
