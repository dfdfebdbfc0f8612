"""python -m tests.gpu.run_nccl_pair: a prefill and a decode node on GPUs, with KV over NCCL.

On two GPUs, or on one with NCCL 2.30 or newer. Not collected by pytest. Exit status 0: all held;
1: something did not; 77: not run. It has not been run on a GPU yet; `--device cpu` rehearses it,
with gloo in NCCL's place.

    one colocated node    prompts --> tokens
    1P1D                  the same prompts --> the same tokens; the lane's bytes went over nccl
    1P1D                  SIGKILL of the prefill node during a transfer: every request ends, the
                          decode node lives and all its blocks are free
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import torch

from coordinator.child import Child
from coordinator.client import AsyncClient
from coordinator.events import GenerationError
from coordinator.supervisor import PROGRAMS, Cluster
from kvtransfer.nccl_group import nccl_version
from tests.e2e.serving import collect, near_ties, wait_all_available, wait_until
from tests.models import make_tiny_model, reference_model
from tests.scrape import Samples, scrape

NOT_RUN = 77
MULTI_RANK_NCCL = (2, 30)
NUM_TOKENS = 24
# Around the edges of blocks of 16, and several chunks of prompt.
PROMPT_LENGTHS = (1, 15, 16, 17, 123, 700, 1500, 3000)
TIMEOUT_S = 170.0
COPY_BYTES = 256 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and (reason := why_not()):
        print(f"not run: {reason}")
        return NOT_RUN
    print(f"torch {torch.__version__}, NCCL {nccl_version()}, {torch.cuda.device_count()} GPUs")

    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await check(device)

    asyncio.run(run())
    print("all held")
    return 0


def why_not() -> str | None:
    """What keeps two ranks from running on this machine, if something does."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    version = nccl_version()
    if version is None:
        return "torch has no NCCL"
    if torch.cuda.device_count() > 1:
        return None
    if tuple(version[:2]) < MULTI_RANK_NCCL:
        return f"one GPU, and NCCL {version} cannot put two ranks on it (2.30 can)"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return None


async def check(device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(
            Path(folder) / "model",
            "llama",
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
        )
        prompts = make_prompts()
        expected = await colocated(model, device, prompts)
        await split(model, device, prompts, expected)


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]


def cluster(model: Path, device: str, *, num_prefill: int) -> Cluster:
    """On two GPUs the prefill node sees the second one only."""
    programs = dict(PROGRAMS)
    if device == "cuda" and torch.cuda.device_count() > 1:
        programs["prefill"] = ("env", "CUDA_VISIBLE_DEVICES=1", *PROGRAMS["prefill"])
    return Cluster(
        model=str(model),
        num_prefill=num_prefill,
        num_decode=1,
        node_options={
            "dtype": "float32",
            "device": device,
            # One GPU holds two pools.
            "kv_memory_gb": 1,
            "metrics_listen": "127.0.0.1:0",
        },
        coordinator_options={"local_prefill": "never"},
        programs=programs,
    )


async def colocated(model: Path, device: str, prompts: list[list[int]]) -> list[list[int]]:
    async with (
        cluster(model, device, num_prefill=0) as whole,
        AsyncClient(whole.address) as client,
    ):
        return await generate(client, prompts, served_as="local")


async def split(
    model: Path, device: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with (
        cluster(model, device, num_prefill=1) as pair,
        AsyncClient(pair.address) as client,
    ):
        got = await generate(client, prompts, served_as="disaggregated")
        reference = reference_model(model)
        ties = sum(
            near_ties(reference, prompt, want, have)
            for prompt, want, have in zip(prompts, expected, got, strict=True)
        )
        print(f"tokens: {len(prompts)} prompts as on one node, {ties} near ties")
        await report_transfers(pair.processes["decode-0"], device)
        await kill_prefill(pair, client)


async def generate(
    client: AsyncClient, prompts: list[list[int]], *, served_as: str
) -> list[list[int]]:
    """All at once; their tokens."""
    results = await asyncio.gather(
        *(collect(client, prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in prompts)
    )
    for result in results:
        assert result.finished.served_as == served_as, result.finished
    await wait_all_available(client)
    return [result.token_ids for result in results]


async def report_transfers(decode: Child, device: str) -> None:
    """What the decode node counts: bytes per second from GRANT to copied, of one chunk."""
    plane = "nccl" if device == "cuda" else "gloo"
    got = await scrape(metrics_address(decode))
    size_bytes = {key[2]: value for key, value in got.items() if is_lane_bytes(key)}
    assert set(size_bytes) == {plane}, f"KV went over {size_bytes}"
    seconds = got[("disagg_lane_chunk_seconds_sum", "received", plane)]
    num_chunks = got[("disagg_lane_chunk_seconds_count", "received", plane)]
    print(
        f"{plane}: {size_bytes[plane] / 1e6:.1f} MB in {num_chunks:.0f} chunks, "
        f"{size_bytes[plane] / seconds / 1e9:.2f} GB/s by a chunk's own time"
    )
    print(f"plain copy on the device: {copy_gb_per_s(device):.1f} GB/s")


def is_lane_bytes(key: tuple[str, ...]) -> bool:
    return key[:2] == ("disagg_lane_bytes_total", "received")


def copy_gb_per_s(device: str) -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    target.copy_(source)
    wait()
    started = time.perf_counter()
    for _ in range(8):
        target.copy_(source)
    wait()
    return 8 * COPY_BYTES / (time.perf_counter() - started) / 1e9


def metrics_address(child: Child) -> str:
    """The node's port that answers HTTP: NCCL and gloo have ports of their own."""
    for each in psutil.Process(child.pid).net_connections(kind="tcp"):
        if each.status == psutil.CONN_LISTEN and is_http(each.laddr.port):
            return f"127.0.0.1:{each.laddr.port}"
    raise AssertionError("the decode node serves no metrics")


def is_http(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


async def kill_prefill(pair: Cluster, client: AsyncClient) -> None:
    """While prompts are on their way."""
    address = metrics_address(pair.processes["decode-0"])

    def received(got: Samples) -> float:
        return sum(value for key, value in got.items() if is_lane_bytes(key))

    before = received(await scrape(address))
    prompts = make_prompts()[-3:] * 4

    async def one(prompt: list[int]) -> Any:
        return await collect(client, prompt, max_tokens=NUM_TOKENS, ignore_eos=True)

    running = [asyncio.create_task(one(prompt)) for prompt in prompts]
    while received(await scrape(address)) == before:
        pass
    pair.processes["prefill-0"].kill()
    started = time.perf_counter()
    ended = await asyncio.gather(*running, return_exceptions=True)
    for end in ended:
        assert not isinstance(end, BaseException) or isinstance(end, GenerationError), end
    await wait_until(client, lambda nodes: [node.role for node in nodes] == ["decode"])
    await wait_all_available(client)
    seconds = time.perf_counter() - started
    print(f"prefill node killed: all ended, all decode blocks free {seconds:.1f} s later")
    assert pair.processes["decode-0"].is_alive


if __name__ == "__main__":
    sys.exit(main())
