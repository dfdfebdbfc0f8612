"""Bytes that go wrong between real nodes: every answer is right, and nothing is held."""

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from coordinator.client import AsyncClient
from coordinator.supervisor import PROGRAMS, Cluster
from tests.e2e.serving import collect, wait_all_available
from tests.faulty_plane import FAULTS
from tests.models import make_tiny_model, reference_greedy, reference_model

FAULTY = {**PROGRAMS, "prefill": (sys.executable, "-m", "tests.faulty_prefill")}
OPTIONS = {"dtype": "float32", "block_size": 4, "kv_memory_gb": 0.05}
PROMPTS = [[(7 * i + n) % 256 for i in range(n)] for n in (300, 200, 5, 33)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = reference_model(folder)
    return [reference_greedy(model, prompt, num_tokens=NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("fault", "plane", "chunk"),
    [
        pytest.param(
            fault,
            plane,
            chunk,
            marks=[] if (fault, chunk) in (("corrupt", 0), ("die", 1)) else pytest.mark.faults,
        )
        for fault in FAULTS
        for plane in ("grpc", "gloo")
        for chunk in (0, 1, 3)
    ],
)
async def test_answers_are_right_whatever_happens_to_a_chunk(
    fault, plane, chunk, folder, expected, monkeypatch
):
    """Chunks are prompts here: four at a time from one prefill node to one decode node."""
    monkeypatch.setenv("DISAGG_TEST_FAULT", f"{fault}:{chunk}")
    async with (
        asyncio.timeout(60),
        Cluster(
            model=str(folder),
            num_prefill=1,
            num_decode=1,
            node_options={**OPTIONS, "plane": plane},
            programs=FAULTY,
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        results = await asyncio.gather(
            *(collect(client, p, max_tokens=NUM_TOKENS, ignore_eos=True) for p in PROMPTS)
        )
        assert [result.token_ids for result in results] == expected
        async with asyncio.timeout(1):
            await wait_all_available(client)


async def test_a_service_listens_where_it_says_and_on_loopback_only(folder):
    async with (
        Cluster(model=str(folder), num_prefill=1, num_decode=1, node_options=OPTIONS) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        await collect(client, PROMPTS[2], max_tokens=2)
        for name, child in cluster.processes.items():
            listening = [
                connection.laddr
                for connection in psutil.Process(child.pid).net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
            named = int(child.address.rpartition(":")[2])
            assert {one.ip.removeprefix("::ffff:") for one in listening} == {"127.0.0.1"}
            others = {address.port for address in listening} - {named}
            # gloo's: of the system's choosing, and only while nodes have a lane.
            assert len(others) <= (0 if name == "coordinator" else 1)
