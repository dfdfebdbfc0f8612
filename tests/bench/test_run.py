"""A whole run: on emulated nodes, from the library; and the command, against a fake coordinator."""

import asyncio
import json
import sys

import pytest
from typer.testing import CliRunner

from bench import recipe as recipes
from bench.cli import serving_commands
from bench.cli_app import app
from bench.cli_run import _slo
from bench.deployment import Deployment
from bench.lengths import Fixed
from bench.open_target import LocalCluster, Remote, open_target
from bench.recipe import Recipe
from bench.records import read_jsonl
from bench.run import LoadOptions, check_fits, find_goodput, run_load, warm_up
from bench.run_files import summarise, write_run
from bench.slo import Slo
from bench.targets import Chunks, Ending
from tests.coordinator.fake_coordinator import serve_fake

RECIPE = Recipe(num_input=Fixed(40), num_output=Fixed(5), rate_per_s=40, cv=0, num_requests=20)


async def test_a_run_on_a_local_cluster_leaves_all_that_was_seen(tmp_path):
    where = LocalCluster(
        deployment=Deployment(num_prefill=1, num_decode=1), model="emulated", kv_memory_gb=0.01
    )
    async with open_target(where) as opened:
        await warm_up(opened.target, seed=3)
        outcome = await run_load(opened.target, RECIPE.workload(), seed=3, options=LoadOptions())
    assert outcome.measures.outcomes["ok"] == 20
    assert sum(outcome.measures.served_as.values()) == 20
    assert outcome.measures.itl_ms.count == 20 * 4
    assert sorted(outcome.nodes) == ["decode-0", "prefill-0"]
    assert sorted(opened.target.metrics) == ["decode-0", "prefill-0"]
    # 20 answers of 5 tokens take at least 4 steps after the first token, and time.
    assert 0 < outcome.nodes["decode-0"]["busy_share"] < 1
    summary = summarise(
        outcome,
        name=opened.name,
        seed=3,
        slo=Slo(ttft_ms=60_000, tpot_ms=60_000),
        goodput=None,
        facts=opened.facts,
    )
    write_run(tmp_path / "run", summary, outcome)
    assert read_jsonl(tmp_path / "run" / "requests.jsonl") == outcome.driven.records
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (told["name"], told["seed"], told["attainment"]) == ("1P1D", 3, 1.0)
    assert told["target"] == "1P1D, emulated"
    assert told["workload"]["mean_input_tokens"] == 40
    assert told["machine"]["cores"] >= 1
    assert told["versions"]["grpcio"]
    assert isinstance(told["validity"]["is_valid"], bool)


class Limited:
    """Serves at once what was asked for at no more than rate_per_s, and refuses all else."""

    def __init__(self, limit_per_s: float) -> None:
        self.prompts: list[list[int]] = []
        self.limit_per_s = limit_per_s
        self.rate_per_s = 0.0

    async def ask(self, prompt: list[int], num_tokens: int, chunks: Chunks) -> Ending:
        self.prompts.append(list(prompt))
        if self.rate_per_s > self.limit_per_s:
            return Ending(outcome="refused", error="QUEUE_FULL")
        chunks.append((asyncio.get_running_loop().time(), num_tokens))
        return Ending()

    async def vocab(self) -> range:
        return range(1000)


async def test_a_search_runs_each_rate_with_prompts_of_its_own(monkeypatch):
    target = Limited(limit_per_s=500)
    monkeypatch.setattr(recipes, "MIN_TTFTS", 0)

    class Rated(Recipe):
        def at_rate(self, rate_per_s: float) -> Recipe:
            target.rate_per_s = rate_per_s
            return super().at_rate(rate_per_s)

    recipe = Rated(num_input=Fixed(9), num_output=Fixed(1), cv=0, num_requests=10)
    found = await find_goodput(
        target,
        recipe,
        slo=Slo(ttft_ms=60_000, tpot_ms=60_000),
        start_per_s=100,
        options=LoadOptions(),
    )
    # 100, 200 and 400 hold, 800 does not; then 600, 500, and 550 until 5 % apart.
    assert [rate for rate, _ in found.tried][:6] == [100, 200, 400, 800, 600, 500]
    assert [share for _, share in found.tried][:6] == [1, 1, 1, 0, 0, 1]
    assert found.rate_per_s == 500
    assert found.best.measures.outcomes["ok"] == 10
    assert len({tuple(prompt) for prompt in target.prompts}) == len(target.prompts)


def test_a_run_of_a_search_lasts_ten_ttft_bounds_at_any_rate():
    recipe = Recipe(num_input=Fixed(9), num_output=Fixed(1), cv=0, num_requests=10)
    asked = recipe.for_search(ttft_ms=500)
    # 5 s at 1 per second would be 5 requests; 10 are the least.
    assert len(asked.at_rate(1).workload().arrivals) == 10
    assert len(asked.at_rate(40).workload().arrivals) == 200


def test_requests_that_are_too_long_are_named_before_the_run():
    check_fits(RECIPE.workload(), max_model_len=45)
    check_fits(RECIPE.workload(), max_model_len=None)
    with pytest.raises(ValueError, match="20 of 20 requests are longer than the 44 tokens"):
        check_fits(RECIPE.workload(), max_model_len=44)


async def test_a_server_that_is_not_there_ends_the_warm_up():
    async with open_target(Remote(address="http://127.0.0.1:1", served_model="m")) as opened:
        with pytest.raises(ConnectionError, match="the warm-up failed"):
            await warm_up(opened.target, seed=0)


def test_an_slo_needs_both_bounds():
    assert _slo(None, None, None) is None
    assert _slo(1.0, 2.0, None) == Slo(ttft_ms=1, tpot_ms=2)
    with pytest.raises(ValueError, match="both"):
        _slo(1.0, None, None)


async def disagg(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from bench.cli import main; main()", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_command_measures_a_coordinator_and_writes_a_report(tmp_path):
    async with serve_fake() as fake:
        code, out, err = await disagg(
            "bench", "run", "--coordinator", fake.address, "--input", "4", "--output", "4",
            "--rate", "50", "--requests", "20", "--ttft-ms", "60000", "--tpot-ms", "60000",
            "-o", str(tmp_path),
        )  # fmt: skip
    # A machine that is busy may make the run invalid, which is told and is exit code 1.
    assert code == (1 if "INVALID" in err else 0), err
    assert "TTFT" in out
    assert "100.0 %" in out
    # 4 for the warm-up.
    assert len(fake.requests) == 24
    assert len(read_jsonl(tmp_path / "requests.jsonl")) == 20
    assert (tmp_path / "report.html").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["command"].endswith(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "need a rate"),
        (("--rate", "1", "--goodput"), "--goodput needs"),
        (("--rate", "1", "--input", "x"), "is no length"),
    ],
)
def test_options_that_do_not_fit_are_told_in_one_line(arguments, words):
    result = CliRunner().invoke(app, ["bench", "run", "--model", "emulated", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.splitlines()) == 1


async def test_the_whole_command_lists_serving_and_measuring():
    assert serving_commands() >= {"generate", "nodes", "up"}
    code, out, _ = await disagg("--help")
    assert code == 0
    assert all(name in out for name in ("generate", "nodes", "bench", "plan"))
