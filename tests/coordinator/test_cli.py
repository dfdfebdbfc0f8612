"""The disagg command as a process: output, exit codes, signals, and nothing left running."""

import asyncio
import dataclasses
import io
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fake_coordinator import FakeCoordinator, finished, serve_fake
from test_supervisor import PROGRAMS, wait_gone

from coordinator import render
from coordinator.events import Finished, read_event

# A model that is in the repository; the stand-ins do not look at it.
UP = ("up", "--listen", "127.0.0.1:0", "--model", "emulated")
ROOT = Path(__file__).parents[2]
MAIN = "from coordinator.cli import main; main()"
# The same command over the stand-in programs; BEHAVE makes one of them misbehave.
WITH_STAND_INS = f"""
import os
import coordinator.cli as cli, coordinator.cli_cluster as cli_cluster
from coordinator.supervisor import Cluster
behave = {{"behave": os.environ.get("BEHAVE")}}
def cluster(*, node_options, coordinator_options=None, **given):
    options = {{
        "coordinator_options": (coordinator_options or {{}}) | behave,
        "node_options": node_options | behave,
    }}
    return Cluster(programs={PROGRAMS!r}, **options, **given)
cli_cluster.Cluster = cluster
cli.main()
"""
# Nothing is downloaded in a test.
WITH_CATALOG = """
import coordinator.cli as cli
from engine.model_cache import FetchFailed
def pull(name, *, progress):
    if name == "gone":
        raise FetchFailed("the hub", "no answer")
    if name != "toy":
        raise ValueError(f"unknown model {name!r}")
    for done in (0, 50, 100):
        progress("download", done, 100)
    progress("convert", 1, 0)
    return "/models/toy"
cli.catalog.pull = pull
cli.main()
"""


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeCoordinator]:
    async with serve_fake() as fake:
        yield fake


async def start(
    *args: str | bytes, code: str = MAIN, stdout: int = asyncio.subprocess.PIPE, **env: str
) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        "GRPC_VERBOSITY": "ERROR",
        **env,
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *args, stdin=pipe, stdout=stdout, stderr=pipe, env=env
    )


async def disagg(
    *args: str | bytes, stdin: str = "", code: str = MAIN, **env: str
) -> tuple[int, str, str]:
    process = await start(*args, code=code, **env)
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def read_until(stream: asyncio.StreamReader | None, text: str) -> None:
    assert stream is not None
    await asyncio.wait_for(stream.readuntil(text.encode()), 60)


async def test_an_answer_goes_to_stdout_and_its_summary_to_stderr(fake: FakeCoordinator) -> None:
    code, out, err = await disagg("generate", "two words", "--coordinator", fake.address)
    assert (code, out) == (0, "twowords\n")
    assert err == (
        "TTFT 500.0 ms | TPOT 100.0 ms | 3.3 tok/s | 2 tokens | disaggregated (paired)"
        " | prefill-0 -> decode-0 | stop | seed 18446744073709551615\n"
    )
    (request,) = fake.requests
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "two words")]
    assert request.stop.max_tokens == 128
    assert not request.sampling.HasField("seed")


async def test_raw_text_and_options_are_sent(fake: FakeCoordinator) -> None:
    options = ["--raw", "--seed", "7", "--temperature", "0.5", "--top-k", "3", "--max-tokens", "9"]
    args = ["generate", "-", *options, "--timeout-s", "50", "--coordinator", fake.address]
    code, _, _ = await disagg(*args, stdin="from stdin\n")
    assert code == 0
    (request,) = fake.requests
    assert request.text == "from stdin\n"
    assert (request.sampling.seed, request.sampling.temperature) == (7, 0.5)
    assert (request.sampling.top_k, request.stop.max_tokens) == (3, 9)
    assert 0 < (fake.deadlines_s[0] or 0) <= 50


async def test_what_a_request_asks_for_besides_sampling_is_sent(fake: FakeCoordinator) -> None:
    options = ["--n", "3", "--stop", "x", "--stop", "y z", "--logprobs", "0", "--json"]
    options += ["--priority", "-5", "--tenant", "blue", "--coordinator", fake.address]
    code, out, err = await disagg("generate", "a", *options)
    assert (code, err) == (0, "")
    (request,) = fake.requests
    assert (request.n, list(request.stop.stop_strings)) == (3, ["x", "y z"])
    assert request.HasField("logprobs")
    assert (request.priority, request.tenant) == (-5, "blue")
    first, *_ = map(json.loads, out.splitlines())
    assert first["logprobs"] == [{"token_id": 1000, "logprob": -0.5, "top": [[7, -0.25]]}]


async def test_choices_follow_each_other_and_do_not_mix(fake: FakeCoordinator) -> None:
    args = ["generate", "two words", "--n", "3", "--coordinator", fake.address]
    code, out, err = await disagg(*args)
    assert (code, out) == (0, "twowords\nTWOWORDS\nTWOWORDS\n")
    assert err.splitlines()[:2] == ["choice 1", "choice 2"]


async def test_another_coordinator_takes_over(fake: FakeCoordinator) -> None:
    args = ["--coordinator", "127.0.0.1:1", "--coordinator", fake.address]
    code, out, _ = await disagg("generate", "two words", *args)
    assert (code, out) == (0, "twowords\n")
    args[-1] = "127.0.0.1:2"
    code, out, err = await disagg("generate", "two words", *args)
    assert (code, out) == (3, "")
    assert err.startswith("disagg: no coordinator at 127.0.0.1:1 or 127.0.0.1:2: ")


async def test_json_is_one_object_per_event(fake: FakeCoordinator) -> None:
    code, out, err = await disagg("generate", "é b", "--json", "--coordinator", fake.address)
    assert (code, err) == (0, "")
    first, second, last = map(json.loads, out.splitlines())
    assert first == {
        "event": "delta",
        "choice": 0,
        "position": 0,
        "token_ids": [1000],
        "text": "é",
        "logprobs": [],
    }
    assert (second["position"], last["event"], last["served_as"]) == (
        1,
        "finished",
        "disaggregated",
    )
    assert last["timing"]["ttft_s"] == 0.5


async def test_a_refused_request_is_one_line_and_exit_code_1(fake: FakeCoordinator) -> None:
    result = await disagg("generate", "refuse", "--coordinator", fake.address)
    assert result == (1, "", "disagg: NO_NODES: no decode node\n")


@pytest.mark.parametrize("command", [["nodes"], ["generate", "x"]])
async def test_no_coordinator_is_one_line_and_exit_code_3(command: list[str]) -> None:
    code, out, err = await disagg(*command, "--coordinator", "127.0.0.1:1")
    assert (code, out) == (3, "")
    assert err.startswith("disagg: no coordinator at 127.0.0.1:1: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["generate"],
        ["generate", "x", "--max-tokens", "0"],
        ["generate", "x", "--top-p", "1.5"],
        ["generate", "x", "--n", "0"],
        ["generate", "x", "--logprobs", "1"],
        ["generate", "x", "--priority", str(2**31)],
        ["drain"],
        ["cache", "clear"],
        ["cache", "clear", "decode-0", "--all"],
        ["generate", b"\xff"],
        ["up", "--decode", "0"],
        ["up", "--model", "no-such-model"],
        ["unknown"],
    ],
)
async def test_wrong_usage_is_exit_code_2_without_a_traceback(args: list[str | bytes]) -> None:
    code, out, err = await disagg(*args)
    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


async def test_the_help_says_what_exit_codes_mean() -> None:
    code, out, _ = await disagg("generate", "--help")
    assert code == 0
    assert "130 interrupted" in " ".join(out.split())


async def test_ctrl_c_cancels_the_call_and_is_exit_code_130(fake: FakeCoordinator) -> None:
    process = await start("generate", "hang", "--coordinator", fake.address)
    await read_until(process.stdout, "hang")
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out, err) == (130, b"\n", b"")
    await asyncio.wait_for(fake.cancelled.wait(), 10)


async def test_a_chat_sends_its_history(fake: FakeCoordinator) -> None:
    args = ["chat", "--system", "Be brief.", "--coordinator", fake.address]
    code, out, _ = await disagg(*args, stdin="first turn\n\nrefuse\nsecond\n/exit\nnever\n")
    assert (code, out) == (0, "> firstturn\n> > > second\n> ")
    first, refused, second = ([m.content for m in r.chat.messages] for r in fake.requests)
    assert first == ["Be brief.", "first turn"]
    assert refused == ["Be brief.", "first turn", "firstturn", "refuse"]
    assert second == ["Be brief.", "first turn", "firstturn", "second"]


async def test_ctrl_c_in_a_chat_ends_the_answer_only(fake: FakeCoordinator) -> None:
    process = await start("chat", "--coordinator", fake.address)
    assert process.stdin is not None
    process.stdin.write(b"hang\n")
    await read_until(process.stdout, "> hang")
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(fake.cancelled.wait(), 10)
    await read_until(process.stdout, "> ")
    out, _ = await asyncio.wait_for(process.communicate(b"go on\n"), 60)
    assert (process.returncode, out) == (0, b"goon\n> \n")
    assert [m.content for m in fake.requests[1].chat.messages] == ["hang", "hang", "go on"]


async def test_nodes_are_a_table_or_json(fake: FakeCoordinator) -> None:
    code, out, _ = await disagg("nodes", "--coordinator", fake.address)
    assert code == 0
    (row,) = (line for line in out.splitlines() if "decode-0" in line)
    cells = re.split(r"\s{2,}", row.strip())
    assert cells == ["decode-0", "decode", "127.0.0.1:1002", "serving", "90 / 100", "2", "1"]
    code, out, _ = await disagg("nodes", "--json", "--coordinator", fake.address)
    assert [json.loads(line)["node_id"] for line in out.splitlines()] == ["prefill-0", "decode-0"]


async def test_top_once_is_one_frame(fake: FakeCoordinator) -> None:
    code, out, err = await disagg("top", "--once", "--coordinator", fake.address)
    assert (code, err) == (0, "")
    (row,) = (line for line in out.splitlines() if "decode-0" in line)
    assert row.split()[:3] == ["decode-0", "decode", "serving"]
    # used / all, running, decoding, queued tokens, step; between the two looks no step was made.
    assert row.split()[-9:] == ["10", "/", "100", "2", "2", "0", "12.5", "ms", "0"]
    assert "busy: prefill 100%, decode 100%" in out


async def test_top_into_a_pipe_is_one_frame_after_another(fake: FakeCoordinator) -> None:
    process = await start("top", "--coordinator", fake.address)
    await read_until(process.stdout, "busy: ")
    await read_until(process.stdout, "busy: ")
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err) == (130, b"")


async def test_top_takes_a_terminal_and_gives_it_back(fake: FakeCoordinator) -> None:
    ours, its = pty.openpty()
    try:
        process = await start("top", "--coordinator", fake.address, stdout=its, TERM="xterm")
        out = await read_terminal(ours, until=b"busy: prefill")
        assert b"\x1b[?1049h" in out  # the alternate screen
        process.send_signal(signal.SIGINT)
        await read_terminal(ours, until=b"\x1b[?1049l")
        _, err = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode, err) == (130, b"")
    finally:
        os.close(ours)
        os.close(its)


async def read_terminal(terminal: int, *, until: bytes) -> bytes:
    out = b""
    async with asyncio.timeout(60):
        while until not in out:
            out += await asyncio.to_thread(os.read, terminal, 65536)
    return out


async def test_drain_names_a_node(fake: FakeCoordinator) -> None:
    assert await disagg("drain", "decode-0", "--coordinator", fake.address) == (0, "", "")
    assert fake.drained == ["decode-0"]


async def test_cache_clear_names_a_node_or_all_of_them(fake: FakeCoordinator) -> None:
    clear = ["cache", "clear", "--coordinator", fake.address]
    assert await disagg(*clear, "decode-0") == (0, "", "")
    assert fake.cleared == ["decode-0"]
    assert await disagg(*clear, "--all") == (0, "", "")
    assert fake.cleared == ["decode-0", "prefill-0", "decode-0"]


async def test_explain_is_a_table_or_json(fake: FakeCoordinator) -> None:
    code, out, _ = await disagg("explain", "r1", "--coordinator", fake.address)
    assert code == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines() if " ms" in line]
    assert [" ".join(row) for row in rows] == ["0.0 ms queued waiting 0", "2.5 ms ended outcome ok"]
    code, out, _ = await disagg("explain", "r1", "--json", "--coordinator", fake.address)
    assert [json.loads(line)["at_s"] for line in out.splitlines()] == [0.0, 0.0025]
    code, _, err = await disagg("explain", "r2", "--coordinator", fake.address)
    assert (code, err) == (1, "disagg: UNKNOWN_REQUEST: no such request\n")


async def test_pull_prints_the_folder() -> None:
    code, out, err = await disagg("pull", "toy", code=WITH_CATALOG)
    assert (code, out) == (0, "/models/toy\n")
    assert "download" in err
    code, out, err = await disagg("pull", "other", code=WITH_CATALOG)
    assert (code, out) == (2, "")
    assert "disagg: unknown model 'other'" in err
    code, out, err = await disagg("pull", "gone", code=WITH_CATALOG)
    assert (code, out) == (1, "")
    assert "disagg: the hub: no answer" in err


@pytest.mark.parametrize(
    ("number", "want"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)],
)
async def test_up_leaves_no_program_behind_whatever_ends_it(
    number: signal.Signals, want: int
) -> None:
    process = await start(*UP, "--decode", "2", code=WITH_STAND_INS)
    await read_until(process.stdout, "ready 127.0.0.1:")
    children = [int(pid) for pid in children_of(process.pid)]
    assert len(children) == 4
    process.send_signal(number)
    await asyncio.gather(*(wait_gone(pid) for pid in children))
    await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == want


async def test_up_stops_all_when_one_program_ends() -> None:
    process = await start(*UP, code=WITH_STAND_INS)
    await read_until(process.stdout, "ready 127.0.0.1:")
    children = [int(pid) for pid in children_of(process.pid)]
    os.kill(children[-1], signal.SIGKILL)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"was ended by SIGKILL" in err
    await asyncio.gather(*(wait_gone(pid) for pid in children))


def children_of(pid: int) -> list[str]:
    # Popen was called on the main thread, so all children are listed there.
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_a_cluster_that_does_not_start_is_exit_code_4(tmp_path: Path) -> None:
    args = [*UP, "--log-dir", str(tmp_path / "logs")]
    code, _, err = await disagg(*args, code=WITH_STAND_INS, BEHAVE="prefill-0=crash")
    assert code == 4
    assert err.splitlines() == [
        "warming up",
        "boom: no memory",
        "disagg: the cluster did not start: prefill-0 exited with status 1 before it listened",
    ]


async def test_the_demo_answers_and_stops() -> None:
    code, out, err = await disagg("demo", "--model", "emulated", code=WITH_STAND_INS)
    assert code == 0
    assert "> What is the capital of France?\nWhatisthecapitalofFrance?\n" in out
    assert "prefill-0 -> decode-0" in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_escape_sequences_of_a_model_do_not_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "a\x1b[2Jb\tc\n\x9b1m😀"
    for stream, want in ((Terminal(), "a\ufffd[2Jb\tc\n\ufffd1m😀"), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        render.write_text(text)
        assert stream.getvalue() == want


def test_a_summary_tells_of_prompt_tokens_that_were_cached() -> None:
    event = read_event(finished(num_tokens=1))
    assert "cached" not in render.summary(event)
    text = render.summary(dataclasses.replace(event, cached_tokens=8))
    assert " | 1 tokens | 8 of 9 prompt tokens cached | " in text


def test_a_summary_of_one_token_has_no_time_per_token() -> None:
    event = read_event(finished(num_tokens=1))
    assert isinstance(event, Finished)
    assert render.summary(event).startswith("TTFT 500.0 ms | TPOT - | 2.0 tok/s | 1 tokens")
