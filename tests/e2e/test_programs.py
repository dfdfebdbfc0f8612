"""The programs as an operator and a client meet them: commands, signals, health, reflection."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator

import psutil
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.client import AsyncClient
from coordinator.supervisor import Cluster
from protos.serving import dial
from tests.e2e.serving import wait_all_available, wait_until

MAIN = "from coordinator.cli import main; main()"
PIPE = asyncio.subprocess.PIPE


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(model="emulated", num_prefill=1, num_decode=1) as cluster:
        yield cluster


async def disagg(*args: str) -> asyncio.subprocess.Process:
    """The disagg command, as a process."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, *args, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )


async def test_generate_streams_json_events(cluster):
    process = await disagg(
        "generate",
        "hello",
        "--raw",
        "--json",
        "--max-tokens",
        "4",
        "--coordinator",
        cluster.address,
    )
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    events = [json.loads(line) for line in stdout.splitlines()]
    assert sum(len(event.get("token_ids", ())) for event in events) == 4
    assert events[-1]["served_as"] == "disaggregated"


async def test_nodes_lists_every_node_with_its_blocks(cluster):
    process = await disagg("nodes", "--json", "--coordinator", cluster.address)
    stdout, _ = await process.communicate()
    nodes = [json.loads(line) for line in stdout.splitlines()]
    assert [(node["node_id"], node["role"], node["state"]) for node in nodes] == [
        ("decode-0", "decode", "serving"),
        ("prefill-0", "prefill", "serving"),
    ]
    assert all(node["available_blocks"] == node["num_blocks"] > 0 for node in nodes)


async def test_a_client_that_is_killed_frees_the_blocks_of_both_nodes(cluster):
    process = await disagg(
        "generate", "x" * 3000, "--raw", "--max-tokens", "20000", "--coordinator", cluster.address
    )
    async with AsyncClient(cluster.address) as client:
        await wait_until(client, lambda nodes: any(node.num_running for node in nodes))
        process.kill()
        await process.wait()
        await wait_all_available(client)


async def test_up_serves_and_leaves_no_child_when_it_is_killed():
    process = await disagg("up", "--model", "emulated", "--listen", "127.0.0.1:0", "--decode", "2")
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b"ready"):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4
    process.send_signal(signal.SIGKILL)
    await process.wait()
    while any(child.is_running() and child.status() != "zombie" for child in children):
        await asyncio.sleep(0.01)


async def test_all_three_servers_answer_health_and_reflection(cluster):
    services = {
        "coordinator": "pd.v1.GenerationService",
        "prefill-0": "pd.v1.PrefillService",
        "decode-0": "pd.v1.DecodeService",
    }
    for name, service in services.items():
        async with dial(cluster.processes[name].address, purpose="test") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for asked in ("", service):
                request = health_pb2.HealthCheckRequest(service=asked)
                answer = await health.Check(request, timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = reflection.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
            )
            response = await anext(aiter(call))
            listed = {entry.name for entry in response.list_services_response.service}
            assert service in listed


async def test_an_emulated_node_holds_no_torch_and_a_node_no_transformers():
    code = (
        "import sys; import decode_server.__main__, prefill_server.__main__\n"
        "from engine.served_model import find_model\n"
        "find_model('emulated', dtype='bfloat16', block_size=16)\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=os.environ)
    assert await process.wait() == 0
