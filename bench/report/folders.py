"""From what a command has left in a folder to its report: report.html and PNG files there.

    disagg bench run        summary.json, requests.jsonl
    disagg bench compare    comparison.json, runs.jsonl, requests/*.jsonl
    disagg bench interfere  summary.json, runs.jsonl, requests/*.jsonl
    disagg bench ratio      ratio.json

Each function returns the page's path, raises ValueError for a folder that has not what it needs or
where matplotlib is missing, and may be called again at any time: nothing is measured.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.figures import FIGURES
from bench.records import RequestRecord, read_jsonl
from bench.report import page
from bench.report.comparison_page import comparison_page, interfere_page
from bench.report.facts import facts_of
from bench.report.ratio_page import ratio_page
from bench.report.run_page import run_page, stamp_of
from bench.run_files import REQUESTS_FILE
from bench.run_files import SUMMARY_FILE as SUMMARY_FILE
from bench.run_log import LoggedRun, read_runs

COMPARISON_FILE = "comparison.json"
RATIO_FILE = "ratio.json"
# Of a comparison: shown as tables and sentences, not as facts.
_CONCLUSIONS = ("candidate", "verdict", "sentence", "findings", "medians")


def write_run_report(folder: Path) -> Path:
    _check_plots(folder)
    summary = _read(folder / SUMMARY_FILE)
    return page.write(run_page(summary, read_jsonl(folder / REQUESTS_FILE)), folder)


def write_compare_report(folder: Path) -> Path:
    _check_plots(folder)
    comparison = _read(folder / COMPARISON_FILE)
    runs = read_runs(folder)
    built = comparison_page(
        comparison,
        title=f"{comparison['candidate']} compared",
        figures=FIGURES,
        runs=runs,
        records=_requests(folder, runs),
        facts=facts_of(comparison, without=_CONCLUSIONS),
    )
    return page.write(built, folder)


def write_interfere_report(folder: Path) -> Path:
    _check_plots(folder)
    runs = read_runs(folder)
    facts = facts_of(_read(folder / SUMMARY_FILE))
    return page.write(interfere_page(runs, records=_requests(folder, runs), facts=facts), folder)


def write_ratio_report(folder: Path) -> Path:
    _check_plots(folder)
    summary = _read(folder / RATIO_FILE)
    built = ratio_page(
        summary["points"],
        title="Goodput of every split",
        verdict=summary.get("advice", ""),
        stamp=stamp_of(summary.get("validity", {})),
        facts=facts_of(summary, without=("points", "advice", "validity")),
    )
    return page.write(built, folder)


def _check_plots(folder: Path) -> None:
    """matplotlib comes with the extra "bench"; what was measured is not lost without it."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{folder} has the results; a report of them needs pip install 'disagg[bench]'"
        )


def _requests(folder: Path, runs: Sequence[LoggedRun]) -> dict[str, list[list[RequestRecord]]]:
    """Of the runs of phase "ab" that kept theirs."""
    found: dict[str, list[list[RequestRecord]]] = {}
    for run in runs:
        if run.phase == "ab" and run.records:
            found.setdefault(run.name, []).append(read_jsonl(folder / run.records))
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no summary: {error}") from error
    return summary
