"""What a comparison's runs say: findings per rival and figure, the verdict.

    runs of both phases --conclude--> Comparison --to_dict--> JSON, bench/report

The deciding figure is goodput where the runs have it, else SLO attainment; it decides against the
colocated deployments only. Peers are reported like them but have no say in whether to split.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.figures import ATTAINMENT, FIGURES, GOODPUT
from bench.run_log import LoggedRun, pairs_of
from bench.verdict import CANNOT_TELL, Figure, Finding, decide, explain, find


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Findings by rival, in FIGURES' order, medians by name over phase "ab", and the verdict."""

    candidate: str
    verdict: str
    sentence: str
    findings: Mapping[str, Sequence[Finding]]
    medians: Mapping[str, Mapping[str, float]]

    def to_dict(self) -> dict[str, object]:
        return {
            "candidate": self.candidate,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "findings": {
                rival: [finding.to_dict() for finding in found]
                for rival, found in self.findings.items()
            },
            "medians": self.medians,
        }


def conclude(
    runs: Sequence[LoggedRun],
    *,
    candidate: str,
    colocated: Sequence[str],
    slo: str,
    seed: int = 0,
) -> Comparison:
    """Compares the candidate with everything else of phase "ab"."""
    middle = medians(runs)
    present = _present(middle)
    findings = {
        rival: [
            find(
                figure,
                rival=rival,
                same=pairs_of(figure, runs, phase="aa"),
                pairs=pairs_of(figure, runs, phase="ab", candidate=candidate, rival=rival),
                seed=seed,
            )
            for figure in present
        ]
        for rival in middle
        if rival != candidate
    }
    deciding = GOODPUT if GOODPUT in present else ATTAINMENT
    deciders = {
        rival: found
        for rival in colocated
        for found in findings.get(rival, ())
        if found.figure == deciding
    }
    verdict = decide(deciders)
    sentence = explain(verdict, deciders, candidate=candidate, slo=slo)
    if verdict == CANNOT_TELL and _all_meet_it(middle, [candidate, *colocated]):
        sentence += "; all meet the SLO at this load: a higher rate may tell"
    num_doubtful = sum(bool(run.problems) for run in runs)
    if num_doubtful:
        sentence += f"; the client was no good measure in {num_doubtful} of {len(runs)} runs"
    return Comparison(
        candidate=candidate,
        verdict=verdict,
        sentence=sentence,
        findings=findings,
        medians=middle,
    )


def medians(runs: Sequence[LoggedRun]) -> dict[str, dict[str, float]]:
    """Of each figure over the runs of phase "ab", by name, in the order of the first round."""
    found: dict[str, dict[str, float]] = {}
    ab = [run for run in runs if run.phase == "ab"]
    for name in dict.fromkeys(run.name for run in ab):
        figures: dict[str, float] = {}
        for figure in FIGURES:
            values = [run.figures.get(figure.name) for run in ab if run.name == name]
            whole = [value for value in values if value is not None]
            if whole:
                figures[figure.name] = statistics.median(whole)
        found[name] = figures
    return found


def _present(middle: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """The figures that any of the runs has."""
    names = {name for figures in middle.values() for name in figures}
    return [figure for figure in FIGURES if figure.name in names]


def _all_meet_it(middle: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> bool:
    return all(middle.get(name, {}).get(ATTAINMENT.name, 0.0) >= 0.99 for name in names)
