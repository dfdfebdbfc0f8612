"""Live, end to end, on emulated nodes, with loads of a moment: what is written, not who wins."""

import json
from pathlib import Path

from bench.compare import ComparePlan, compare
from bench.contender import Served
from bench.deployment import parse_deployment
from bench.interfere import InterfereLoad
from bench.interfere_run import interfere
from bench.lengths import parse_lengths
from bench.measured import GoodputRun, LoadRun
from bench.ratio import sweep
from bench.recipe import Recipe
from bench.records import read_jsonl
from bench.run_log import read_runs
from bench.slo import Slo

SLO = Slo(ttft_ms=10_000, tpot_ms=10_000)


# Within a tenth of a second or so.
SIX_REQUESTS = Recipe(
    num_input=parse_lengths("400"), num_output=parse_lengths("4"), rate_per_s=200.0, num_requests=6
)


async def test_a_split_is_compared_with_itself_and_with_colocated_serving(tmp_path: Path) -> None:
    plan = ComparePlan(
        deployment=parse_deployment("1P1D"),
        model="emulated",
        kv_memory_gb=0.02,
        num_rounds=1,
        slo="TTFT 10 s, TPOT 10 s",
    )
    measure = LoadRun(recipe=SIX_REQUESTS, slo=SLO, folder=tmp_path)
    comparison = await compare(plan, tmp_path, measure=measure)
    runs = read_runs(tmp_path)
    assert [(run.phase, run.round, run.name) for run in runs] == [
        ("aa", 0, "1P1D"), ("aa", 0, "1P1D again"), ("ab", 0, "1P1D"), ("ab", 0, "colocated 2x1"),
    ]  # fmt: skip
    # One pair is too little for any word, and the words say so.
    assert comparison.sentence.startswith(
        "cannot tell, for TTFT 10 s, TPOT 10 s: SLO attainment of 1P1D against colocated 2x1: "
        "cannot tell (1 pairs); all meet the SLO at this load"
    )
    for run in runs:
        records = read_jsonl(tmp_path / run.records)
        assert [record.outcome for record in records] == ["ok"] * 6
        # A decode node of a split may take short prompts itself when it has time.
        is_split = "disaggregated" in {record.served_as for record in records}
        assert is_split == run.name.startswith("1P1D")
    assert json.loads(json.dumps(comparison.to_dict()))["medians"]["1P1D"]["num_missed"] == 0


async def test_streams_and_long_prompts_on_two_deployments_in_turns(tmp_path: Path) -> None:
    contenders = [
        Served(parse_deployment(name), model="emulated", kv_memory_gb=0.02, log_dir=tmp_path / name)
        for name in ("1P1D", "colocated 1x1")
    ]
    load = InterfereLoad(
        num_streams=2, num_output=16, num_long_input=300, every_s=0.1, duration_s=0.35
    )
    runs = await interfere(contenders, load, num_rounds=1, seed=0, folder=tmp_path)
    assert [run.name for run in runs] == ["1P1D", "colocated 1x1"]
    for run in runs:
        labels = [record.label for record in read_jsonl(tmp_path / run.records)]
        assert labels.count("long") == 3
        assert run.figures["num_failed"] == 0


async def test_a_sweep_measures_the_goodput_of_each_split_beside_its_prediction(
    tmp_path: Path,
) -> None:
    search = GoodputRun(
        recipe=SIX_REQUESTS, slo=Slo(ttft_ms=0, tpot_ms=0), folder=tmp_path, start_per_s=5e4
    )
    points = await sweep(
        [parse_deployment("1P1D")],
        model="emulated",
        kv_memory_gb=0.02,
        folder=tmp_path,
        search=search,
        predict=lambda deployment: (1.0, 0.5, 1.5),
    )
    # Nobody meets a bound of nothing.
    assert [(point.name, point.goodput_rps) for point in points] == [("1P1D", 0.0)]
    assert (points[0].predicted_low_rps, points[0].predicted_high_rps) == (0.5, 1.5)
