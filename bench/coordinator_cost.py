"""python -m bench.coordinator_cost: what the coordinator adds, in time and CPU, on emulated nodes.

    TTFT added    a client's TTFT through the coordinator, less that of a client which calls the
                  same nodes itself (Decode, then Prefill), in turns, one request at a time
    ITL added     gaps of many streams at a fixed rate, less the predicted decode step
    CPU per token of the coordinator's process, over those streams
    cancel to free from a client's leaving a stream to every block of every node being available, as
                  the coordinator tells it

Emulated nodes sleep for their steps, so the cores belong to the servers and the client.
"""

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import struct
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Self

import grpc.aio
import psutil

from coordinator.client import AsyncClient
from coordinator.events import Delta
from coordinator.supervisor import Cluster
from engine.catalog import resolve_model
from protos.pd.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)
from protos.serving import dial

NUM_DECODE = 4
PROMPT = [7] * 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.coordinator_cost")
    add = parser.add_argument
    add("--streams", type=int, default=100)
    add("--rate", type=float, default=20.0, help="tokens per second of each stream")
    add("--tokens", type=int, default=200, help="of each stream")
    add("--requests", type=int, default=200, help="one at a time, for TTFT")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder) / "emulated"))


def emulated_model(folder: Path, *, step_ms: float, rows: int) -> None:
    """A copy of the emulated model whose decode steps of so many rows last step_ms."""
    shutil.copytree(resolve_model("emulated", allow_download=False).folder, folder)
    config = json.loads((folder / "config.json").read_text())
    profile: dict[str, float] = config["cost_profile"]
    profile |= {"base_ms": 1.0, "decode_row_ms": (step_ms - 1.0) / rows, "decode_context_ms": 0.0}
    (folder / "config.json").write_text(json.dumps(config))


async def measure(args: argparse.Namespace, folder: Path) -> None:
    step_ms = 1e3 / args.rate
    emulated_model(folder, step_ms=step_ms, rows=args.streams // NUM_DECODE)
    async with (
        Cluster(
            model=str(folder),
            num_prefill=1,
            num_decode=NUM_DECODE,
            coordinator_options={"local_prefill": "never"},
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        freed_s = sorted([await cancel_to_free_s(client) for _ in range(args.requests)])
        coordinator = psutil.Process(cluster.processes["coordinator"].pid)
        await streams(client, num_streams=4, num_tokens=10)
        ttft_s, direct_s = [], []
        async with Direct(cluster, model=folder.name) as direct:
            for _ in range(args.requests):
                ttft_s.append(await first_token_s(client))
                direct_s.append(await direct.first_token_s())
        cpu_before, started = cpu_s(coordinator), time.monotonic()
        gaps_s, num_messages = await streams(
            client, num_streams=args.streams, num_tokens=args.tokens
        )
        wall_s = time.monotonic() - started
        used_s = cpu_s(coordinator) - cpu_before
    num_tokens = args.streams * args.tokens
    added = sorted(1e3 * gap - step_ms for gap in gaps_s)
    ttft_ms, direct_ms = 1e3 * statistics.median(ttft_s), 1e3 * statistics.median(direct_s)
    print(f"TTFT p50: {ttft_ms:.2f} ms, {direct_ms:.2f} without a coordinator: "
          f"{ttft_ms - direct_ms:.2f} added")  # fmt: skip
    print(f"cancel to free: p50 {1e3 * freed_s[len(freed_s) // 2]:.1f}, "
          f"p99 {1e3 * freed_s[int(0.99 * len(freed_s))]:.1f} ms")  # fmt: skip
    print(f"{args.streams} streams x {args.rate:g} tokens/s, {NUM_DECODE} decode nodes:")
    print(
        f"  ITL added: p50 {added[len(added) // 2]:.1f}, p99 {added[int(0.99 * len(added))]:.1f} ms"
    )
    print(f"  coordinator CPU: {1e3 * used_s / num_tokens:.3f} ms per token, "
          f"{used_s / wall_s:.0%} of a core")  # fmt: skip
    print(f"  messages to clients: {num_messages / wall_s:.0f}/s")


class Direct:
    """A client that does what the coordinator does for one request, and nothing else."""

    def __init__(self, cluster: Cluster, *, model: str) -> None:
        self._addresses = [cluster.processes[name].address for name in ("prefill-0", "decode-0")]
        self._prefill_ref = types_pb2.NodeRef(node_id="prefill-0")
        self._cluster = cluster
        self._model = model

    async def __aenter__(self) -> Self:
        channels = [dial(address, purpose="direct") for address in self._addresses]
        self._channels = channels
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(channels[0])
        self._decode = decode_pb2_grpc.DecodeServiceStub(channels[1])
        async with dial(self._cluster.address, purpose="direct") as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            nodes = (await stub.ListNodes(cluster_pb2.ListNodesRequest())).nodes
        refs = {info.registration.node.node_id: info.registration.node for info in nodes}
        self._prefill_ref = refs["prefill-0"]
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def first_token_s(self) -> float:
        sequence = types_pb2.Sequence(
            request_id="direct",
            token_ids=struct.pack(f"<{len(PROMPT)}i", *PROMPT),
            num_prompt_tokens=len(PROMPT),
            stop=types_pb2.StopConditions(max_tokens=2),
            num_choices=1,
            model=self._model,
        )
        started = time.monotonic()
        decode = self._decode.Decode()
        await decode.write(decode_pb2.DecodeRequest(start=sequence))
        remote = decode_pb2.Remote(prefill=self._prefill_ref)
        await decode.write(decode_pb2.DecodeRequest(remote=remote))
        await decode.done_writing()
        target = (await decode.read()).reserved.target
        request = prefill_pb2.PrefillRequest(sequence=sequence, target=target)
        first_s = 0.0
        async for response in self._prefill.Prefill(request):
            if response.HasField("first_token"):
                first_s = time.monotonic() - started
        while await decode.read() is not grpc.aio.EOF:
            pass
        return first_s


async def first_token_s(client: AsyncClient) -> float:
    started = time.monotonic()
    first_s = 0.0
    async for event in client.generate(PROMPT, max_tokens=2):
        if isinstance(event, Delta) and not first_s:
            first_s = time.monotonic() - started
    return first_s


async def cancel_to_free_s(client: AsyncClient) -> float:
    """A stream is left after three tokens."""
    num_tokens = 0
    async with aclosing(client.generate(PROMPT, max_tokens=10_000)) as events:
        async for event in events:
            num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
            if num_tokens >= 3:
                break
    started = time.monotonic()
    # There is no call that waits for a change.
    while any(n.available_blocks != n.num_blocks for n in await client.list_nodes()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return time.monotonic() - started


async def streams(
    client: AsyncClient, *, num_streams: int, num_tokens: int
) -> tuple[list[float], int]:
    """Every gap after the second token, and how many messages came."""
    gaps: list[float] = []
    num_messages = 0

    async def one() -> None:
        nonlocal num_messages
        stamps: list[float] = []
        async for event in client.generate(PROMPT, max_tokens=num_tokens):
            num_messages += 1
            if isinstance(event, Delta):
                stamps += [time.monotonic()] * len(event.token_ids)
        gaps.extend(after - before for before, after in itertools.pairwise(stamps[1:]))

    await asyncio.gather(*(one() for _ in range(num_streams)))
    return gaps, num_messages


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
