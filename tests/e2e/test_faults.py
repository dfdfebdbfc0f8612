"""Every fault, of every program, at every stage of a request, on 2 + 2 nodes: the stream goes on.

The stream must equal the undisturbed one, token for token. Where the design allows no better it
may end in a typed error: only when the coordinator itself is killed, started again or frozen for
longer than its client's pings allow; then nobody is left who knows of the stream. Two seconds after
everything is back, every block of every node is available. `make test` runs seven cells,
`make test-faults` the others.
"""

import asyncio
import contextlib
import itertools
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator.client import AsyncClient
from coordinator.events import Delta, Finished, GenerationError
from protos.pd.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc
from protos.serving import dial
from tests.e2e.fault_cluster import COORDINATOR, FaultCluster
from tests.e2e.serving import predicted
from tests.models import make_tiny_model, reference_greedy, reference_model

FAULTS = ("kill", "freeze", "restart", "cut")
VICTIMS = ("prefill", "decode", COORDINATOR)
STAGES = ("queued", "prefilling", "transferring", "decoding")
FROZEN_S, CUT_S = 8.0, 4.0
AVAILABLE_S = 2.0
# More than a second of emulated prefill, and one of decode.
LONG_PROMPT, NUM_TOKENS = [5] * 12_000, 400
FLAGS = ["--drain-grace-s", "0.5", "--plane", "grpc"]
# Those that differ most: each kind of fault, each victim and each stage.
IN_MAKE_TEST = {
    ("kill", "prefill", "queued"),
    ("kill", "prefill", "transferring"),
    ("kill", "decode", "decoding"),
    ("kill", COORDINATOR, "decoding"),
    ("freeze", "decode", "decoding"),
    ("restart", "decode", "decoding"),
    ("cut", "prefill", "prefilling"),
}
CELLS = [
    pytest.param(*cell, marks=[] if cell in IN_MAKE_TEST else pytest.mark.faults, id="-".join(cell))
    for cell in itertools.product(FAULTS, VICTIMS, STAGES)
]


@dataclass
class Stream:
    """A request's stream as the client sees it."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    error: GenerationError | None = None
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, address: str, prompt: list[int], num_tokens: int) -> None:
        try:
            async with AsyncClient(address) as client:
                async for event in client.generate(
                    prompt,
                    max_tokens=num_tokens,
                    ignore_eos=True,
                    request_id=self.request_id,
                    timeout_s=60,
                ):
                    if isinstance(event, Delta):
                        assert event.position == len(prompt) + len(self.token_ids)
                        self.token_ids += event.token_ids
                    else:
                        self.finished = event
                    self.grown.set()
        except GenerationError as error:
            self.error = error

    async def has(self, num_tokens: int) -> None:
        while len(self.token_ids) < num_tokens:
            self.grown.clear()
            await self.grown.wait()


class Observer:
    """What the coordinator tells of a request and of nodes."""

    def __init__(self, channel) -> None:
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(channel)

    async def wait_for(self, request_id: str, what: str) -> dict[str, str]:
        """The details of the first event of a kind, once there is one."""
        while True:
            with contextlib.suppress(Exception):
                story = await self._generation.Explain(
                    generation_pb2.ExplainRequest(request_id=request_id), timeout=5
                )
                for event in story.events:
                    if event.what == what:
                        return dict(event.details)
            await asyncio.sleep(0.005)

    async def half_computed(self, node_id: str, num_tokens: int) -> None:
        while True:
            answer = await self._cluster.ListNodes(cluster_pb2.ListNodesRequest(), timeout=5)
            for node in answer.nodes:
                is_it = node.registration.node.node_id == node_id
                if is_it and 0 < node.status.queued_tokens < num_tokens // 2:
                    return
            await asyncio.sleep(0.005)


async def reach(stage: str, observer: Observer, stream: Stream) -> dict[str, str]:
    """Waits until the request is at the stage. Returns its pair by role, as far as it has one."""
    if stage == "queued":
        await observer.wait_for(stream.request_id, "queued")
        return {"prefill": "prefill-0", "decode": "decode-0"}
    pair = await observer.wait_for(stream.request_id, "paired")
    pair = {role: pair[role].partition("#")[0] for role in ("prefill", "decode")}
    await observer.wait_for(stream.request_id, "reserved")
    if stage == "transferring":
        await observer.half_computed(pair["prefill"], len(LONG_PROMPT))
    if stage == "decoding":
        await stream.has(20)
    return pair


async def disturb(cluster: FaultCluster, fault: str, victim: str) -> None:
    """Does it, and mends it."""
    child = cluster.children[victim]
    match fault:
        case "kill":
            child.kill()
            await child.exited
            await cluster.start(victim)
        case "restart":
            child.terminate()
            assert await child.exited == 0
            await cluster.start(victim)
        case "freeze":
            child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)
            child.send_signal(signal.SIGCONT)
        case "cut":
            cluster.proxies[victim].cut()
            await asyncio.sleep(CUT_S)
            cluster.proxies[victim].mend()


async def blocks_come_back(cluster: FaultCluster) -> None:
    async with asyncio.timeout(20):
        await cluster.registered()
    async with asyncio.timeout(AVAILABLE_S):
        await cluster.whole()


@pytest.mark.parametrize(("fault", "victim", "stage"), CELLS)
async def test_a_stream_is_as_if_nothing_had_happened(fault: str, victim: str, stage: str):
    prompt = [5] * 10 if stage == "decoding" else LONG_PROMPT
    streams = [Stream(request_id=f"r{index}") for index in range(3 if stage == "queued" else 1)]
    async with (
        asyncio.timeout(90),
        FaultCluster(model="emulated", flags=FLAGS) as cluster,
        dial(cluster.address, purpose="test") as channel,
        asyncio.TaskGroup() as tasks,
    ):
        observer = Observer(channel)
        for stream in streams:
            # The first two keep the prefill nodes busy while the third waits.
            tasks.create_task(stream.read(cluster.address, prompt, NUM_TOKENS))
            await observer.wait_for(stream.request_id, "queued")
        pair = await reach(stage, observer, streams[-1])
        await disturb(cluster, fault, pair.get(victim, victim))
        for stream in streams:
            while stream.finished is None and stream.error is None:
                stream.grown.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await stream.grown.wait()
        await blocks_come_back(cluster)
    expected = predicted(prompt, NUM_TOKENS)
    for stream in streams:
        if victim == COORDINATOR and fault != "cut":
            assert stream.token_ids == expected[: len(stream.token_ids)]
            assert stream.finished is not None or stream.error is not None
            continue
        assert stream.error is None
        assert stream.token_ids == expected


@pytest.mark.faults
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("stage", ["prefilling", "decoding"])
async def test_a_real_models_stream_is_as_if_nothing_had_happened(
    fault: str, victim: str, stage: str, tmp_path: Path
):
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    prompt, num_tokens = [(7 * i) % 256 for i in range(300)], 150
    expected = reference_greedy(reference_model(folder), prompt, num_tokens=num_tokens)
    flags = [*FLAGS, "--dtype", "float32", "--block-size", "4", "--kv-memory-gb", "0.05"]
    flags += ["--step-budget-ms", "0.2"]
    stream = Stream(request_id="r")
    async with (
        asyncio.timeout(90),
        FaultCluster(model=str(folder), flags=flags) as cluster,
        dial(cluster.address, purpose="test") as channel,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(stream.read(cluster.address, prompt, num_tokens))
        pair = await reach(stage, Observer(channel), stream)
        await disturb(cluster, fault, pair[victim])
        while stream.finished is None and stream.error is None:
            await asyncio.sleep(0.05)
        await blocks_come_back(cluster)
    assert stream.error is None
    assert stream.token_ids == expected
