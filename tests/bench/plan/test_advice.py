"""What is said of predicted splits, and that every split is among them."""

import json
from dataclasses import replace

from clusters import cluster, profile
from typer.testing import CliRunner

from bench.cli_app import app
from bench.lengths import Fixed
from bench.plan.advice import Outlook, advise, is_better
from bench.plan.cluster_model import NodeModel
from bench.plan.demand import MadeUp, Recorded
from bench.plan.outlooks import Question, every_split, outlook
from bench.plan.planned_nodes import NodeChanges, TypedFigures, known_nodes, planned_cluster
from bench.plan.predict import Goodput
from bench.slo import Slo
from bench.workload import Arrival, Workload

NODE = NodeModel(profile=profile(base_ms=10.0, row_ms=1.0, token_ms=0.5), num_blocks=1000)


def seen(name, *per_seed):
    return Outlook(
        name=name,
        num_nodes=2,
        is_colocated="colocated" in name,
        goodput=Goodput(per_seed=per_seed),
        at_rate=None,
    )


def test_a_split_that_is_better_under_every_seed_is_advised():
    (verdict,) = advise([seen("2 colocated", 4.0, 5.0), seen("1P1D", 5.0, 6.0)])
    assert verdict == "Disaggregate: 1P1D serves the most within the SLO, 5.5 requests/s (5 to 6)."
    (verdict,) = advise([seen("2 colocated", 7.0, 8.0), seen("1P1D", 5.0, 6.0)])
    assert verdict.startswith("Colocate: 2 colocated serves the most")


def test_what_chance_could_have_done_is_no_difference():
    (verdict,) = advise([seen("2 colocated", 5.2, 5.9), seen("1P1D", 5.0, 6.5)])
    assert verdict.startswith("No difference beyond the error band between 1P1D, 2 colocated")
    assert verdict.endswith("Then colocate (2 colocated): it is simpler.")
    # 2 % are within what the search leaves open, whatever the seeds say.
    assert not is_better(seen("1P1D", 5.1, 5.1), seen("2 colocated", 5.0, 5.0))


def test_an_slo_that_nobody_can_keep_is_said_to_be_one():
    (verdict,) = advise([seen("2 colocated", 0.0), seen("1P1D", 0.0)])
    assert verdict.startswith("No split meets the SLO")


def test_every_split_of_four_nodes():
    names = [one.name for one in every_split(cluster(0, 1, prefill=NODE), num_nodes=4)]
    assert names == ["4 colocated", "1P3D", "2P2D", "3P1D"]


def test_an_outlook_has_goodput_and_what_happens_at_the_asked_rate():
    question = Question(
        demand=MadeUp(
            num_input=Fixed(64), num_output=Fixed(8), num_requests=50, min_duration_s=5.0
        ),
        slo=Slo(ttft_ms=200.0, tpot_ms=30.0),
        rate_per_s=2.0,
        seeds=(0, 1),
    )
    found = outlook(question, cluster(1, 1, prefill=NODE))
    assert found.goodput.low > 2.0
    assert found.at_rate is not None and found.at_rate.attainments == (1.0, 1.0)
    # 42 ms of prefill; 11 ms for a row alone.
    assert found.at_rate.ttft_ms is not None and round(found.at_rate.ttft_ms.p50) == 42
    assert found.at_rate.tpot_ms is not None and found.at_rate.tpot_ms.p50 > 10.999
    twice = replace(NODE, profile=profile(base_ms=5.0, row_ms=0.5, token_ms=0.25))
    assert outlook(question, cluster(1, 1, prefill=twice)).goodput.low > found.goodput.high


def test_a_stretch_of_a_trace_has_the_asked_rate_and_goes_on_at_its_start():
    trace = Workload(
        name="t",
        arrivals=tuple(Arrival(at_s=at_s, num_input=i + 1, num_output=1)
                       for i, at_s in enumerate((0.0, 1.0, 3.0, 4.0))),
    )  # fmt: skip
    taken = Recorded(trace=trace, num_requests=4).workload(rate_per_s=10.0, seed=3)
    order = [arrival.num_input for arrival in taken.arrivals]
    assert sorted(order) == [1, 2, 3, 4]
    assert order == order[:1] + [number % 4 + 1 for number in order[:-1]]
    assert abs(taken.rate_per_s - 10.0) < 1e-9


def test_typed_figures_go_before_the_profile_and_speeds_divide_them(tmp_path):
    path = tmp_path / "profile.json"
    figures = {"base_ms": 10, "decode_row_ms": 1, "prefill_token_ms": 0.5,
               "decode_context_ms": 0, "prefill_context_ms": 0}  # fmt: skip
    path.write_text(json.dumps({"cost_profile": figures, "kv_bytes_per_token": 1000}))
    known = known_nodes(coordinator=None, profile=path, figures=TypedFigures())
    changes = NodeChanges(
        figures=TypedFigures(base_ms=6.0), prefill_speed=2.0, kv_memory_gb=0.016, max_running=8
    )
    planned = planned_cluster(known, changes, num_nodes=3, bandwidth_gbs=10.0)
    assert planned.name == "3 colocated"
    assert planned.prefill.profile == profile(base_ms=3.0, row_ms=0.5, token_ms=0.25)
    assert planned.decode.profile == profile(base_ms=6.0, row_ms=1.0, token_ms=0.5)
    # 16 MB of 16,000 bytes a block.
    assert (planned.decode.num_blocks, planned.decode.max_running) == (1000, 8)


def test_disagg_plan_prints_json_and_says_what_it_lacks():
    slo = ["--ttft-ms", "300", "--tpot-ms", "40"]
    nothing = CliRunner().invoke(app, ["plan", "--nodes", "2", *slo])
    assert nothing.exit_code == 2
    typed = ["--base-ms", "10", "--token-ms", "0.5", "--kv-bytes-per-token", "1000"]
    load = ["--input", "64", "--output", "4", "--rate", "2", "--requests", "20", "--seeds", "1",
            "--duration-s", "3"]  # fmt: skip
    result = CliRunner().invoke(app, ["plan", "--nodes", "2", *slo, *typed, *load, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [one["name"] for one in document["deployments"]] == ["2 colocated", "1P1D"]
    assert document["deployments"][0]["at_rate"]["num_requests"] == 20
    assert document["advice"]
