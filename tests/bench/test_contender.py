"""Live, on emulated nodes: the programs of one cluster run while those of the other are stopped."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.contender import Outside, Served
from bench.deployment import parse_deployment
from coordinator.client import AsyncClient
from coordinator.events import Finished


async def ways_served(contender: Served, *, first_token: int) -> set[str]:
    """Of four prompts that nobody has seen: a decode node may take some of them itself."""
    async with AsyncClient(contender.address) as client:

        async def one(token: int) -> str:
            async for event in client.generate([token] * 400, max_tokens=4, ignore_eos=True):
                if isinstance(event, Finished):
                    return event.served_as
            raise AssertionError("the answer has no end")

        return set(await asyncio.gather(*(one(first_token + n) for n in range(4))))


async def all_stop(pids: Sequence[int]) -> None:
    """A stop signal acts when the process runs next."""
    async with asyncio.timeout(5):
        while {psutil.Process(pid).status() for pid in pids} != {psutil.STATUS_STOPPED}:
            await asyncio.sleep(0.001)


def num_stopped(pids: Sequence[int]) -> int:
    return [psutil.Process(pid).status() for pid in pids].count(psutil.STATUS_STOPPED)


def served(name: str, folder: Path) -> Served:
    return Served(
        parse_deployment(name), model="emulated", kv_memory_gb=0.01, log_dir=folder / name
    )


async def test_only_the_contender_that_is_awake_runs(tmp_path: Path) -> None:
    async with served("1P1D", tmp_path) as split, served("colocated 1x1", tmp_path) as whole:
        for number in (1, 2):
            await all_stop(whole.pids)
            async with split.awake():
                assert (num_stopped(split.pids), num_stopped(whole.pids)) == (0, 2)
                assert "disaggregated" in await ways_served(split, first_token=10 * number)
            await all_stop(split.pids)
            async with whole.awake():
                assert (num_stopped(split.pids), num_stopped(whole.pids)) == (3, 0)
                assert await ways_served(whole, first_token=10 * number) == {"local"}
        pids = [*split.pids, *whole.pids]
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_server_outside_is_frozen_with_its_children_and_thawed_in_the_end() -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['cat']).pid, flush=True); input()"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    pids = [parent.pid, child.pid]
    async with Outside("http://127.0.0.1:1", model="m", pids=[parent.pid]) as outside:
        await all_stop(pids)
        async with outside.awake():
            assert num_stopped(pids) == 0
        await all_stop(pids)
    assert num_stopped(pids) == 0
    child.kill()
    parent.kill()
    await parent.wait()
