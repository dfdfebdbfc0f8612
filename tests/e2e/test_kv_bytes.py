"""The KV that the decode node holds is, byte for byte, what the prefill node computed.

Both nodes run in this process, on real sockets: that is what lets the test look into both pools.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch

from coordinator.child import Child
from coordinator.client import AsyncClient
from decode_server.service import DecodeRole
from engine.knobs import parse_knobs
from engine.node import Node
from engine.node_program import serve_node
from kvtransfer.blocks import BlockPool, Lease
from prefill_server.service import PrefillRole
from protos.pd.v1 import cluster_pb2
from tests.e2e.serving import collect, wait_until
from tests.models import make_tiny_model

BLOCK_SIZE = 8


@asynccontextmanager
async def node_here(role_name: str, make_role, role: int, flags: list[str]):
    """A node of this process: yields (node, leases as they are made)."""
    made: asyncio.Future[Node] = asyncio.get_running_loop().create_future()

    def make(node: Node, server):
        made.set_result(node)
        return make_role(node, server)

    stop = asyncio.Event()
    config = parse_knobs(role_name, argv=flags)
    serving = asyncio.create_task(
        serve_node(config, stop, role=role, role_name=role_name, make_role=make)
    )
    try:
        node = await made
        yield node, record_leases(node.pool)
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def coordinator_process(folder: Path) -> AsyncIterator[str]:
    command = [sys.executable, "-m", "coordinator", "--listen", "127.0.0.1:0"]
    child = Child("coordinator", [*command, "--model", str(folder)], log_path=None)
    try:
        yield await child.read_address()
    finally:
        child.terminate()
        await child.exited


def record_leases(pool: BlockPool) -> list[Lease]:
    leases: list[Lease] = []
    reserve = pool.reserve

    def recording(num_blocks: int, **options) -> Lease:
        leases.append(reserve(num_blocks, **options))
        return leases[-1]

    pool.reserve = recording
    return leases


def kv(node: Node, lease: Lease, num_tokens: int) -> torch.Tensor:
    """[num_layers, 2, num_kv_heads, num_tokens, head_dim] of the lease's first tokens, as bits."""
    blocks = torch.stack(
        [
            torch.frombuffer(node.memory.block(index), dtype=torch.int32).view(
                node.model.layout.block_shape
            )
            for index in lease.block_ids[: node.model.layout.blocks_for(num_tokens)]
        ],
        dim=3,
    )
    return blocks.flatten(3, 4)[:, :, :, :num_tokens]


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 123])
@pytest.mark.parametrize("plane", ["grpc", "gloo"])
async def test_decode_blocks_equal_prefill_blocks(num_tokens: int, plane: str, tmp_path: Path):
    folder = make_tiny_model(tmp_path / "tiny", "qwen3")
    prompt = [random.Random(num_tokens).randrange(256) for _ in range(num_tokens)]
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(coordinator_process(folder))
        flags = ["--coordinator", address, "--model", str(folder), "--dtype", "float32"]
        flags += ["--block-size", str(BLOCK_SIZE), "--kv-memory-gb", "0.01", "--plane", plane]
        prefill, sent = await stack.enter_async_context(
            node_here("prefill", PrefillRole, cluster_pb2.NODE_ROLE_PREFILL, flags)
        )
        decode, received = await stack.enter_async_context(
            node_here("decode", DecodeRole, cluster_pb2.NODE_ROLE_DECODE, flags)
        )
        client = await stack.enter_async_context(AsyncClient(address))
        await wait_until(client, lambda nodes: [n.state for n in nodes] == ["serving"] * 2)
        # Those before are the calibration's, those after are what the engine grows into.
        before = len(sent), len(received)
        result = await collect(client, prompt, max_tokens=5, ignore_eos=True)
        assert result.finished.served_as == "disaggregated"
        ours = kv(prefill, sent[before[0]], num_tokens)
        theirs = kv(decode, received[before[1]], num_tokens)
        assert torch.equal(ours, theirs)
        assert ours.any()
