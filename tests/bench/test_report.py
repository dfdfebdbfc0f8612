"""Pages, plots and tables from requests that are made up, with figures that are known by hand."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.comparison import conclude
from bench.figures import FIGURES
from bench.measures import measure
from bench.records import RequestRecord, write_jsonl
from bench.report import folders, page
from bench.report.agreement import Pair
from bench.report.agreement_page import agreement_page
from bench.report.comparison_page import comparison_page, interfere_page
from bench.report.page import Cell, Page, Stamp, Table
from bench.report.ratio_page import ratio_page
from bench.report.run_page import run_page
from bench.report.table import rich_table
from bench.run_log import LoggedRun, append_run

SPLIT, TWIN, WHOLE = "1P1D", "1P1D again", "colocated 1x2"
VALID = Stamp(is_valid=True)


def request(index: int, *, gap_s: float, offered_s: float = 0.0, **fields: Any) -> RequestRecord:
    """First token 250 ms after it was due, then three more, each gap_s later."""
    first_s = offered_s + 0.25
    chunks = tuple((first_s + number * gap_s, 1) for number in range(4))
    return RequestRecord(
        index=index,
        offered_s=offered_s,
        sent_s=offered_s + 0.001,
        num_input=fields.pop("num_input", 64),
        num_output=4,
        chunks=chunks,
        ended_s=chunks[-1][0],
        **fields,
    )


def requests() -> list[RequestRecord]:
    """Three with gaps of 20 ms, and one with gaps of 125 ms: three gaps of twelve over 100 ms."""
    served = [request(index, gap_s=0.020, served_as="disaggregated") for index in range(3)]
    stalled = request(3, gap_s=0.125, offered_s=1.0, num_input=1500, label="long")
    refused = RequestRecord(
        index=4, offered_s=2.0, sent_s=2.0, num_input=9, num_output=9, outcome="refused"
    )
    return [*served, stalled, refused]


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "name": SPLIT,
        "seed": 7,
        "machine": {
            "cpu": "a processor",
            "versions": {"torch": "2.13.0", "numpy": "2.4"},
            "command": "disagg bench run --seed 7 <script>alert(1)</script>",
        },
        "slo": {"ttft_ms": 400.0, "tpot_ms": 50.0},
        "attainment": 0.6,
        "measures": measure(requests(), wall_s=4.0).to_dict(),
        "validity": {"reasons": [], "late_p99_ms": 1.0},
        **changes,
    }


def logged_runs() -> list[LoggedRun]:
    """Ten rounds: the split has half of the colocated one's ITL; A/A differs by 1 %."""
    return [
        LoggedRun(phase=phase, round=number, name=name, figures=figures)
        for number in range(10)
        for phase, name, figures in (
            ("aa", SPLIT, {"attainment": 0.8, "itl_p99_ms": 25.0}),
            ("aa", TWIN, {"attainment": 0.8, "itl_p99_ms": 25.0 * 1.01 ** (-1) ** number}),
            ("ab", SPLIT, {"attainment": 0.95, "itl_p99_ms": 25.0}),
            ("ab", WHOLE, {"attainment": 0.7, "itl_p99_ms": 50.0}),
        )
    ]


@cache
def the_comparison_page() -> Page:
    return comparison_page_of(logged_runs())


def comparison_page_of(runs: Sequence[LoggedRun]) -> Page:
    comparison = conclude(runs, candidate=SPLIT, colocated=[WHOLE], slo="TTFT 400 ms")
    return comparison_page(
        comparison.to_dict(),
        title="1P1D compared",
        figures=FIGURES,
        runs=runs,
        records={SPLIT: [requests()], WHOLE: [requests()]},
        facts=[("seed", "7")],
    )


def the_ratio_page() -> Page:
    points: list[dict[str, Any]] = [
        {"name": "colocated 4x1", "goodput_rps": 4.0, "predicted_rps": 4.4},
        {"name": "1P3D", "goodput_rps": 5.0, "predicted_rps": 4.0, "predicted_low_rps": 3.5},
        {"name": "2P2D", "goodput_rps": 0.0},
    ]
    return ratio_page(points, title="Ratios", verdict="1P3D is best", stamp=VALID, facts=[])


def cells(html: str) -> list[str]:
    """Text of all cells of all tables."""
    return re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", html)


def row(html: str, name: str) -> list[str]:
    """Cells of the first row that name begins."""
    for line in html.splitlines():
        found = cells(line)
        if found and found[0] == name:
            return found
    raise AssertionError(f"no row {name}")


def test_a_run_shows_every_figure_as_computed_by_hand() -> None:
    html = page.render(run_page(summary(), requests()))
    # Three times 20 ms and one of 125 in each quarter: nine of twelve gaps are 20.
    assert row(html, "ITL (every gap)")[1] == "20"
    assert row(html, "ITL (every gap)")[6:] == ["125", "12"]
    assert row(html, "TTFT")[1:] == ["250"] * 6 + ["4"]
    assert row(html, "gaps over 100 ms")[1] == "3 of 12"
    assert row(html, "requests refused")[1] == "1"
    assert row(html, "served as disaggregated")[1] == "3"
    # 16 tokens in 4 s.
    assert row(html, "output, tok/s")[1] == "4"
    assert row(html, "SLO attainment: TTFT at most 400 ms, TPOT at most 50 ms")[1] == "60.0 %"
    assert row(html, "cpu")[1] == "a processor"
    assert row(html, "versions")[1] == "torch: 2.13.0; numpy: 2.4"
    assert row(html, "command")[1].startswith("disagg bench run --seed 7 &lt;script&gt;")
    assert row(html, "seed")[1] == "7"


def test_a_valid_run_says_so_and_what_was_checked() -> None:
    html = page.render(run_page(summary(), requests()))
    assert "Valid." in html
    assert "INVALID" not in html
    assert "late p99 ms: 1" in html


def test_an_invalid_run_shouts_in_the_title_and_above_every_figure() -> None:
    reason = "requests were sent late: 80 ms at p99"
    html = page.render(run_page(summary(validity={"reasons": [reason]}), requests()))
    assert "<title>INVALID: " in html
    assert html.index("<strong>INVALID</strong>") < html.index(reason) < html.index("<table")


def test_a_run_without_a_single_answer_has_a_page_too() -> None:
    records = [request(0, gap_s=0.02)]
    refused = [
        RequestRecord(
            index=0, offered_s=0.0, sent_s=0.0, num_input=1, num_output=1, outcome="refused"
        )
    ]
    empty = measure(refused, wall_s=1.0).to_dict()
    built = run_page(summary(measures=empty), refused)
    assert not built.plots
    assert row(page.render(built), "requests refused")[1] == "1"
    assert run_page(summary(), records).plots


def test_goodput_is_marked_where_the_search_found_it() -> None:
    goodput = {"rate_per_s": 3.5, "tried": [[2.0, 1.0], [4.0, 0.5], [3.5, 0.92]]}
    built = run_page(summary(goodput=goodput), requests())
    assert built.plots[-1].file == "goodput"
    assert "goodput 3.5/s" in page.render(built)


def test_a_comparison_shows_verdict_band_and_words() -> None:
    html = page.render(the_comparison_page())
    assert "disaggregate, for TTFT 400 ms" in html
    found = row(html, "ITL p99, ms")
    assert found[1:3] == ["25", "50"]
    assert found[3].startswith("±")
    assert found[4] == "0.50x (0.50 to 0.50) better"
    assert 'class="good">25<' in html
    # Every run is there: forty, and one header.
    assert sum(cell.startswith(("aa ", "ab ")) for cell in cells(html)) == 40


def test_one_late_client_in_forty_runs_makes_the_comparison_invalid() -> None:
    runs = logged_runs()
    runs[7] = replace(runs[7], problems=["the client took 99% of a core"])
    html = page.render(comparison_page_of(runs))
    assert "<title>INVALID: " in html
    assert "ab 1 colocated 1x2: the client took 99% of a core" in html


def test_ratios_show_the_error_of_each_prediction_and_their_median() -> None:
    html = page.render(the_ratio_page())
    assert row(html, "colocated 4x1")[4] == "+10.0 %"
    assert row(html, "1P3D")[3:] == ["3.5 to 4", "-20.0 %"]
    assert row(html, "2P2D")[4] == ""
    assert "median 15.0 %, largest 20.0 %" in html


@pytest.mark.parametrize("which", ["run", "comparison", "ratio"])
def test_a_page_is_one_file_that_loads_and_runs_nothing(which: str) -> None:
    built = {
        "run": lambda: run_page(summary(), requests()),
        "comparison": the_comparison_page,
        "ratio": the_ratio_page,
    }[which]()
    html = page.render(built)
    assert "http:" not in html
    assert "https:" not in html
    assert "<script" not in html
    assert "<link" not in html
    assert "@import" not in html
    for address in re.findall(r'(?:src|href)="([^"]*)"', html):
        assert address.startswith(("#", "data:image/png;base64,")), address
    # Colours are variables, so that the page has a dark side.
    assert "prefers-color-scheme: dark" in html
    assert "fill: var(--ink)" in html


def test_interference_has_medians_and_no_word() -> None:
    runs = [
        LoggedRun(phase="ab", round=number, name=SPLIT, figures={"itl_p999_ms": value})
        for number, value in enumerate([30.0, 28.0, 90.0])
    ]
    html = page.render(interfere_page(runs, records={SPLIT: [requests()]}, facts=[]))
    assert row(html, "ITL p99.9, ms") == ["ITL p99.9, ms", "30"]
    assert "better" not in html
    # The long prompt's span is marked.
    assert "shaded: a long prompt waits" in html


def test_a_report_is_made_of_what_a_command_left_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(summary()))
    write_jsonl(tmp_path / "requests.jsonl", requests())
    html = folders.write_run_report(tmp_path).read_text()
    assert row(html, "TTFT")[1] == "250"


def test_a_comparison_is_made_of_its_folder_too(tmp_path: Path) -> None:
    runs = [replace(run, records="requests/one.jsonl") for run in logged_runs()]
    comparison = conclude(runs, candidate=SPLIT, colocated=[WHOLE], slo="TTFT 400 ms").to_dict()
    (tmp_path / "comparison.json").write_text(json.dumps({**comparison, "seed": 7}))
    (tmp_path / "requests").mkdir()
    write_jsonl(tmp_path / "requests/one.jsonl", requests())
    for run in runs:
        append_run(tmp_path, run)
    html = folders.write_compare_report(tmp_path).read_text()
    assert "0.50x (0.50 to 0.50) better" in html
    assert row(html, "seed")[1] == "7"
    assert (tmp_path / "latency.png").exists()


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"summary\.json"):
        folders.write_run_report(tmp_path)


def test_without_matplotlib_the_results_are_there_and_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"pip install 'disagg\[bench\]'"):
        folders.write_run_report(tmp_path)


def test_pngs_lie_beside_the_page(tmp_path: Path) -> None:
    built = run_page(summary(), requests())
    assert page.write(built, tmp_path) == tmp_path / "report.html"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["gaps.png", "latency.png", "report.html"]
    for name in ("gaps.png", "latency.png"):
        image = (tmp_path / name).read_bytes()
        assert image.startswith(b"\x89PNG\r\n\x1a\n")
        assert image.rstrip().endswith(b"IEND\xaeB`\x82")


def test_errors_of_predictions_are_printed_and_those_past_the_bound_marked() -> None:
    pairs = [
        Pair(figure="TTFT p50", unit="ms", name=SPLIT, predicted=90.0, measured=100.0, load="2/s"),
        Pair(figure="TTFT p50", unit="ms", name=WHOLE, predicted=140.0, measured=100.0),
        Pair(figure="TPOT p50", unit="ms", name=WHOLE, predicted=20.0, measured=20.0),
    ]
    html = page.render(agreement_page(pairs, title="Plan", stamp=VALID, facts=[]))
    assert "3 predictions: median error 10.0 %, largest 40.0 %" in html
    assert row(html, "TTFT p50")[1:] == ["25.0 %", "40.0 %", "2"]
    assert row(html, "TPOT p50")[1:] == ["0.0 %", "0.0 %", "1"]
    assert row(html, "1P1D, 2/s")[2:] == ["90", "100", "-10.0 %"]
    assert 'class="bad">+40.0 %<' in html
    assert "predicted, ms" in html


def test_the_terminal_shows_the_same_cells() -> None:
    console = Console(width=200, record=True, file=sys.stderr)
    for table in the_comparison_page().tables[:1]:
        console.print(rich_table(table))
    shown = console.export_text()
    assert "0.50x (0.50 to 0.50) better" in shown


def test_names_with_brackets_and_colons_are_shown_as_they_are() -> None:
    table = Table(title="[b]", header=["", ":100: [red]"], rows=[[Cell(":100:"), Cell("[b]1")]])
    console = Console(width=100, record=True, file=sys.stderr)
    console.print(rich_table(table))
    shown = console.export_text()
    assert ":100: [red]" in shown
    assert "[b]1" in shown


def test_the_command_starts_without_matplotlib() -> None:
    code = (
        "import sys, bench.report.run_page, bench.report.comparison_page, bench.report.ratio_page, "
        "bench.report.table; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
