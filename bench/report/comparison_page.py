"""Pages of runs in turns: verdict, medians with words, effects, latencies, gaps, every run.

    Comparison.to_dict, runs.jsonl, requests of the runs --comparison_page--> Page
                        runs.jsonl, requests of the runs --interfere_page--> Page

disagg bench interfere has no A/A phase, and so neither words nor a verdict.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.interfere import FIGURES as INTERFERE_FIGURES
from bench.records import RequestRecord
from bench.report import effects, gaps_over_time, latency_cdf
from bench.report.effects import Effect
from bench.report.page import Cell, Page, Plot, Stamp, Table, plain
from bench.report.side_by_side import comparison_table, medians_table, shown
from bench.run_log import LoggedRun
from bench.verdict import Figure, Finding


def comparison_page(
    comparison: Mapping[str, Any],
    *,
    title: str,
    figures: Sequence[Figure],
    runs: Sequence[LoggedRun],
    records: Mapping[str, Sequence[Sequence[RequestRecord]]],
    facts: Sequence[tuple[str, str]],
) -> Page:
    """records: of each deployment, the requests of each of its runs in phase "ab"."""
    candidate = comparison["candidate"]
    known = {figure.name: figure for figure in figures}
    findings = {
        rival: [finding_of(each, known) for each in found if each["figure"] in known]
        for rival, found in comparison["findings"].items()
    }
    medians = comparison["medians"]
    present = [f for f in figures if any(f.name in values for values in medians.values())]
    return Page(
        title=title,
        stamp=stamp_of_runs(runs),
        verdict=comparison.get("sentence", ""),
        facts=facts,
        tables=[
            comparison_table(
                candidate=candidate, figures=present, medians=medians, findings=findings
            ),
            every_run_table(runs, present),
        ],
        plots=[*_effect_plots(candidate, findings), *_request_plots(records)],
    )


def interfere_page(
    runs: Sequence[LoggedRun],
    *,
    records: Mapping[str, Sequence[Sequence[RequestRecord]]],
    facts: Sequence[tuple[str, str]],
) -> Page:
    """Steady streams beside long prompts; records as in comparison_page."""
    plots = _request_plots(records)
    return Page(
        title="Streams beside long prompts",
        stamp=stamp_of_runs(runs),
        facts=facts,
        tables=[medians_table(INTERFERE_FIGURES, runs), every_run_table(runs, INTERFERE_FIGURES)],
        # What long prompts do is in the gaps: they come first.
        plots=list(reversed(plots)),
    )


def finding_of(fields: Mapping[str, Any], figures: Mapping[str, Figure]) -> Finding:
    """From Finding.to_dict."""
    return Finding(**{**fields, "figure": figures[fields["figure"]]})


def stamp_of_runs(runs: Sequence[LoggedRun]) -> Stamp:
    """Invalid if the load generator found anything wrong with itself in any run."""
    problems = [
        f"{run_title(run)}: {problem}" for run in runs for problem in dict.fromkeys(run.problems)
    ]
    if problems:
        return Stamp(is_valid=False, reasons=problems)
    return Stamp(
        is_valid=True,
        reasons=[f"in none of {len(runs)} runs was the client late, out of files or CPU-bound"],
    )


def run_title(run: LoggedRun) -> str:
    return f"{run.phase} {run.round} {run.name}"


def every_run_table(runs: Sequence[LoggedRun], figures: Sequence[Figure]) -> Table:
    """What the medians and intervals are made of, in the order in which the runs ran."""
    return Table(
        title="Every run",
        header=["run", *(figure.title for figure in figures)],
        rows=[
            [
                Cell(run_title(run), "bad" if run.problems else ""),
                *(plain(shown(run.figures.get(figure.name))) for figure in figures),
            ]
            for run in runs
        ],
        note="aa: the deployment against itself; ab: all in turns.",
    )


def _effect_plots(candidate: str, findings: Mapping[str, Sequence[Finding]]) -> list[Plot]:
    plots = []
    for number, (rival, found) in enumerate(findings.items()):
        chosen = [_effect(one) for one in found if not one.figure.is_difference]
        drawn = [effect for effect in chosen if effect is not None]
        if drawn:
            plots.append(
                Plot(
                    title=f"{candidate} against {rival}",
                    file=f"effects-{number}",
                    figure=effects.draw(drawn, candidate=candidate, rival=rival),
                    caption="Ratio of the figures with its 95 % interval; the grey bar is what the "
                    "deployment differs by from itself (A/A). An interval that touches the bar "
                    "cannot tell. What is compared as a difference is in the table.",
                )
            )
    return plots


def _effect(found: Finding) -> Effect | None:
    if found.effect is None or found.low is None or found.high is None or found.band is None:
        return None
    return Effect(
        title=found.figure.title,
        ratio=found.effect,
        low=found.low,
        high=found.high,
        band=found.band,
        word=found.word,
    )


def _request_plots(records: Mapping[str, Sequence[Sequence[RequestRecord]]]) -> list[Plot]:
    """Latencies of all runs together; gaps over time of the last run of each."""
    there = {name: runs for name, runs in records.items() if any(runs)}
    if not there:
        return []
    together = {name: [r for run in runs for r in run] for name, runs in there.items()}
    return [
        Plot(
            title="Latency",
            file="latency",
            figure=latency_cdf.draw(together),
            caption="Requests of all runs. Further left is faster; the vertical scale spreads the "
            "tail, so that a curve that turns right at p99 stalls one gap in a hundred.",
        ),
        Plot(
            title="Gaps over time",
            file="gaps",
            figure=gaps_over_time.draw({name: runs[-1] for name, runs in there.items()}),
            caption="Every gap between two messages with tokens, in the last run of each.",
        ),
    ]
