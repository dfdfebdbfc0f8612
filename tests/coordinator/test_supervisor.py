"""The supervisor with stand-in programs: starting, failing, stopping, and dying itself."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.child import ChildFailed
from coordinator.client import AsyncClient
from coordinator.supervisor import Cluster

HERE = Path(__file__).parent
PROGRAMS = {
    role: (sys.executable, str(HERE / "fake_program.py"), role)
    for role in ("coordinator", "prefill", "decode")
}


@pytest.fixture(autouse=True)
def repository_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    # A script has its own folder on its path, not where it was started.
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))


def cluster(*, behave: str | None = None, **options: Any) -> Cluster:
    defaults: dict[str, Any] = {
        "model": "toy",
        "num_prefill": 1,
        "num_decode": 2,
        "programs": PROGRAMS,
    }
    programs = {"behave": behave}
    return Cluster(**defaults | options, node_options=programs, coordinator_options=programs)


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def wait_gone(pid: int) -> None:
    """Waits for a process that is not our child (its pidfd gets readable)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, gone.set)
    try:
        await asyncio.wait_for(gone.wait(), 20)
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


async def test_entering_returns_with_all_nodes_serving_and_leaving_stops_them() -> None:
    async with cluster() as running:
        async with AsyncClient(running.address) as client:
            nodes = {node.node_id: node for node in await client.list_nodes()}
        assert set(nodes) == {"prefill-0", "decode-0", "decode-1"}
        assert {node.state for node in nodes.values()} == {"serving"}
        assert running.processes["decode-1"].address == nodes["decode-1"].address
        children = dict(running.processes)
    assert set(children) == {"coordinator", *nodes}
    assert {child.exited.result() for child in children.values()} == {0}
    assert not any(is_running(child.pid) for child in children.values())


async def test_no_prefill_nodes_is_a_cluster_too() -> None:
    async with cluster(num_prefill=0, num_decode=1) as running:
        assert set(running.processes) == {"coordinator", "decode-0"}


def test_a_cluster_without_decode_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="0 decode nodes"):
        cluster(num_decode=0)


@pytest.mark.parametrize(
    ("behave", "what"),
    [
        ("coordinator=crash", "coordinator exited with status 1 before it listened"),
        ("decode-1=crash", "decode-1 exited with status 1 before it listened"),
        ("decode-1=garbage", "decode-1 announced no address but b'hello"),
    ],
)
async def test_a_program_that_fails_to_start_is_named_and_the_others_stop(
    tmp_path: Path, behave: str, what: str
) -> None:
    starting = cluster(behave=behave, log_dir=tmp_path)
    with pytest.raises(ChildFailed) as caught:
        await starting.__aenter__()
    assert str(caught.value).startswith(what)
    if "crash" in behave:
        assert caught.value.log_tail == "warming up\nboom: no memory"
    assert not any(is_running(child.pid) for child in starting.processes.values())


@pytest.mark.parametrize(
    ("behave", "what"), [("silent", "does not listen"), ("idle", "is not serving")]
)
async def test_a_node_that_does_not_get_ready_is_named_at_the_deadline(
    behave: str, what: str
) -> None:
    starting = cluster(behave=f"prefill-0={behave}", start_timeout_s=5.0)
    with pytest.raises(ChildFailed, match=f"prefill-0 {what} after 5 s"):
        await starting.__aenter__()
    assert not any(is_running(child.pid) for child in starting.processes.values())


async def test_cancelling_the_start_stops_what_was_started() -> None:
    starting = cluster(behave="prefill-0=idle")
    task = asyncio.create_task(starting.__aenter__())
    while "decode-1" not in starting.processes or not starting.processes["decode-1"].address:
        await asyncio.wait([task], timeout=0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(is_running(child.pid) for child in starting.processes.values())


async def test_a_program_that_ends_is_reported_with_its_signal() -> None:
    async with cluster() as running:
        running.processes["decode-0"].send_signal(signal.SIGKILL)
        with pytest.raises(ChildFailed, match="decode-0 was ended by SIGKILL"):
            await asyncio.wait_for(running.wait_exit(), 10)


async def test_a_node_that_ended_is_started_again() -> None:
    async with cluster(num_decode=1) as running:
        old = running.processes["decode-0"]
        old.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(asyncio.shield(old.exited), 10) == -signal.SIGKILL
        new = await running.start_node("decode-0")
        await running.wait_serving()
        assert running.processes["decode-0"] is new
        assert new.pid != old.pid


async def test_a_frozen_program_stops_as_the_others_do() -> None:
    async with cluster(num_decode=1) as running:
        frozen = running.processes["decode-0"]
        frozen.send_signal(signal.SIGSTOP)
    assert frozen.exited.result() == 0


async def test_a_program_that_ignores_the_stop_is_killed_after_the_deadline() -> None:
    async with cluster(behave="decode-0=deaf", stop_timeout_s=1.0) as running:
        deaf, other = running.processes["decode-0"], running.processes["prefill-0"]
    assert deaf.exited.result() == -signal.SIGKILL
    assert other.exited.result() == 0


async def test_a_program_that_prints_more_than_its_line_is_not_blocked() -> None:
    async with cluster(behave="decode-0=chatty") as running:
        chatty = running.processes["decode-0"]
    assert chatty.exited.result() == 0


async def test_logs_go_to_a_file_per_program(tmp_path: Path) -> None:
    async with cluster(num_decode=1, log_dir=tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == ["coordinator.log", "decode-0.log", "prefill-0.log"]


OWNER = """
import asyncio, sys
sys.path.insert(0, {here!r})
from test_supervisor import cluster

async def main():
    async with cluster() as running:
        print(*(child.pid for child in running.processes.values()), flush=True)
        await running.wait_exit()

asyncio.run(main())
"""


async def test_killing_the_supervisor_leaves_no_program_behind() -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER.format(here=str(HERE)), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in (await asyncio.wait_for(owner.stdout.readline(), 60)).split()]
    try:
        assert len(pids) == 4
        assert all(is_running(pid) for pid in pids)
    finally:
        owner.kill()
    # All of them, not only the last that was started: none holds the pipe of another.
    await asyncio.gather(*(wait_gone(pid) for pid in pids))
    await asyncio.wait_for(owner.wait(), 10)
