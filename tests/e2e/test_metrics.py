"""Metrics and logs of real programs, read the way that an operator's tools read them."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from coordinator.child import Child
from coordinator.client import AsyncClient
from coordinator.events import GenerationError
from coordinator.supervisor import Cluster
from tests.e2e.serving import collect, wait_all_available
from tests.scrape import Samples, scrape

PIPE = asyncio.subprocess.PIPE
IN_FLIGHT = ("disagg_requests_in_flight",)
# More than a decode node would rather compute by itself.
LONG_PROMPT = [5] * 2000
PROGRAMS = ("coordinator", "prefill-0", "decode-0")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster whose programs log JSON and serve metrics, and where they do."""

    client: AsyncClient
    metrics: dict[str, str]
    log_dir: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory) -> AsyncIterator[Served]:
    log_dir = tmp_path_factory.mktemp("logs")
    options = {"metrics_listen": "127.0.0.1:0", "log_format": "json"}
    async with (
        Cluster(
            model="emulated",
            num_prefill=1,
            num_decode=1,
            node_options=options | {"kv_memory_gb": 0.00002},
            coordinator_options=options,
            log_dir=log_dir,
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        metrics = {name: metrics_address(cluster.processes[name]) for name in PROGRAMS}
        yield Served(client, metrics, log_dir)


def listening_ports(child: Child) -> set[int]:
    connections = psutil.Process(child.pid).net_connections(kind="tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def metrics_address(child: Child) -> str:
    """The one port that is not the server's; what the program announces has its own test."""
    (port,) = listening_ports(child) - {int(child.address.rpartition(":")[2])}
    return f"127.0.0.1:{port}"


async def all_ended(served: Served) -> Samples:
    """What the coordinator tells once no request runs; the test's timeout is the deadline."""
    await wait_all_available(served.client)
    while (got := await scrape(served.metrics["coordinator"]))[IN_FLIGHT]:
        pass
    return got


def by_label(got: Samples, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one metric that are not zero."""
    return {key[1:]: value for key, value in got.items() if key[0] == name and value}


async def test_counters_add_up_with_what_the_client_saw(served):
    before = await scrape(served.metrics["coordinator"])
    prompts = [*([5] * length for length in (1, 15, 16, 17)), LONG_PROMPT]
    results = await asyncio.gather(
        *(collect(served.client, prompt, max_tokens=6) for prompt in prompts)
    )
    await collect(served.client, [1, 2, 3], max_tokens=1)
    with pytest.raises(GenerationError, match="max_tokens"):
        await collect(served.client, [5] * 100, max_tokens=10**7)
    got = await all_ended(served)
    grown = {key: value - before.get(key, 0.0) for key, value in got.items()}

    outcomes = by_label(grown, "disagg_requests_total")
    assert results[-1].finished.served_as == "disaggregated"
    served_as = [result.finished.served_as for result in results]
    assert outcomes.pop(("OK", "disaggregated")) == 1 + served_as.count("disaggregated")
    assert outcomes.pop(("OK", "local"), 0) == served_as.count("local")
    ((refused, count),) = outcomes.items()
    assert refused in {("CONTEXT_TOO_LONG", "none"), ("INVALID_ARGUMENT", "none")} and count == 1

    # Six tokens of each of five requests, and the one token of another.
    assert grown[("disagg_generated_tokens_total",)] == 5 * 6 + 1
    assert grown[("disagg_prompt_tokens_total",)] == 1 + 15 + 16 + 17 + 2000 + 3
    assert grown[("disagg_ttft_seconds_count",)] == 6
    assert grown[("disagg_e2e_seconds_count",)] == 6
    assert grown[("disagg_queue_seconds_count",)] == 6
    assert grown[("disagg_itl_seconds_count",)] == 5 * 5
    assert grown[("disagg_handoff_gap_seconds_count",)] == served_as.count("disaggregated")
    assert sum(by_label(grown, "disagg_pairings_total").values()) >= 6
    assert got[("disagg_queue_length",)] == 0
    assert by_label(got, "disagg_nodes") == {("prefill", "serving"): 1, ("decode", "serving"): 1}
    assert got[("process_cpu_seconds_total",)] > 0


async def test_a_call_that_the_client_leaves_is_counted_as_that(served):
    before = await scrape(served.metrics["coordinator"])
    stream = served.client.generate([5] * 20, max_tokens=4000, ignore_eos=True)
    await anext(stream)
    running = await scrape(served.metrics["coordinator"])
    assert running[IN_FLIGHT] == 1
    await stream.aclose()
    after = await all_ended(served)
    key = ("disagg_requests_total", "CANCELLED", "none")
    assert after[key] - before.get(key, 0.0) == 1


async def test_blocks_of_a_node_add_up_while_it_works_and_all_are_available_afterwards(served):
    nodes = {node.node_id: node for node in await served.client.list_nodes()}
    stream = served.client.generate([5] * 200, max_tokens=4000, ignore_eos=True)
    await anext(stream)
    busy = await scrape(served.metrics["decode-0"])
    assert sum(by_label(busy, "disagg_node_kv_blocks").values()) == nodes["decode-0"].num_blocks
    assert busy[("disagg_node_kv_blocks", "free")] < nodes["decode-0"].num_blocks
    assert busy[("disagg_node_requests_running",)] == 1
    await stream.aclose()
    await wait_all_available(served.client)
    for name in ("prefill-0", "decode-0"):
        got = await scrape(served.metrics[name])
        blocks = by_label(got, "disagg_node_kv_blocks")
        assert set(blocks) <= {("free",), ("cached",)}
        assert sum(blocks.values()) == nodes[name].num_blocks
        assert got[("disagg_node_requests_running",)] == 0
        assert got[("disagg_engine_steps_total",)] > 0
        assert got[("disagg_node_info", "emulated", name, name.partition("-")[0])] == 1
        assert by_label(got, "disagg_node_state") == {("serving",): 1}


async def test_every_log_line_is_json_and_a_request_is_found_in_all_three_programs(served):
    # A prompt of its own: one that a decode node has cached needs no prefill node.
    prompt = [99, *LONG_PROMPT]
    await collect(served.client, prompt, max_tokens=2, request_id="find-me")
    await all_ended(served)
    for name in PROGRAMS:
        text = (served.log_dir / f"{name}.log").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
        mine = [line for line in lines if line.get("request") == "find-me"]
        assert mine and mine[-1]["message"].startswith("request ")


async def test_the_metrics_port_is_announced_and_there_is_none_without_the_flag(tmp_path):
    command = [sys.executable, "-m", "coordinator", "--model", "emulated", "--exit-with-parent"]
    with_port = await asyncio.create_subprocess_exec(
        *command, *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
        stdin=PIPE,
        stdout=PIPE,
    )  # fmt: skip
    without = Child("coordinator", [*command, "--listen", "127.0.0.1:0"], log_path=None)
    assert with_port.stdin is not None and with_port.stdout is not None
    try:
        announced = json.loads(await with_port.stdout.readline())
        got = await scrape(announced["metrics_address"])
        assert got[IN_FLIGHT] == 0
        address = await without.read_address()
        assert listening_ports(without) == {int(address.rpartition(":")[2])}
    finally:
        with_port.stdin.close()
        without.terminate()
        assert await with_port.wait() == 0
        await without.exited
