"""A cluster on this machine: starts the three programs, owns them, and leaves none behind.

    coordinator --> its address --> nodes, all at once --> their addresses --> all SERVING

    async with Cluster(model="smollm2-135m", num_prefill=1, num_decode=2) as cluster:
        AsyncClient(cluster.address)

Leaving stops all of them: SIGTERM, a deadline, SIGKILL. If this process is killed, the programs
see EOF on stdin (--exit-with-parent) and stop by themselves. The CLI, the benchmarks and the
end-to-end tests run on it; tests also kill and freeze children through `processes`.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.child import Child, ChildFailed, describe_exit
from coordinator.client import AsyncClient
from coordinator.events import GenerationError

PROGRAMS: Mapping[str, Sequence[str]] = {
    "coordinator": (sys.executable, "-m", "coordinator"),
    "prefill": (sys.executable, "-m", "prefill_server"),
    "decode": (sys.executable, "-m", "decode_server"),
}
COORDINATOR = "coordinator"
# Between two looks at the node list, which has no call that waits for a change.
_LOOK_INTERVAL_S = 0.1
_REAP_TIMEOUT_S = 5.0


class Cluster:
    """One coordinator and its nodes, named "prefill-0", "decode-0", ...: an async context.

    Entering returns when all nodes are SERVING, and raises ChildFailed otherwise. Options are
    program flags by name ({"kv_memory_gb": 1} is --kv-memory-gb 1); None leaves a flag out, True
    gives it without a value. With log_dir, each program's stderr goes to log_dir/NAME.log.
    start_timeout_s is for listening, and once more for serving; on_loaded is told meanwhile how
    much of its weights each node has loaded.
    """

    def __init__(
        self,
        *,
        model: str,
        num_prefill: int,
        num_decode: int,
        node_options: Mapping[str, object] | None = None,
        coordinator_options: Mapping[str, object] | None = None,
        listen: str = "127.0.0.1:0",
        log_dir: Path | None = None,
        start_timeout_s: float = 120.0,
        stop_timeout_s: float = 10.0,
        programs: Mapping[str, Sequence[str]] = PROGRAMS,
        on_loaded: Callable[[str, int, int], None] = lambda what, percent, in_all: None,
    ) -> None:
        if num_prefill < 0 or num_decode < 1:
            raise ValueError(f"{num_prefill} prefill and {num_decode} decode nodes: need 0+ and 1+")
        self.address = ""
        self.processes: dict[str, Child] = {}
        self._node_names = [f"prefill-{i}" for i in range(num_prefill)]
        self._node_names += [f"decode-{i}" for i in range(num_decode)]
        self._node_options = {"model": model, **(node_options or {})}
        self._coordinator_options = {"model": model, **(coordinator_options or {})}
        self._listen = listen
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._programs = programs
        self._on_loaded = on_loaded

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self.address = await self._spawn(
                    COORDINATOR, {"listen": self._listen, **self._coordinator_options}
                ).read_address()
                await asyncio.gather(*(self.start_node(name) for name in self._node_names))
            await self.wait_serving()
        except TimeoutError as error:
            failure = self._start_failure()
            await self.stop()
            raise failure from error
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start_node(self, name: str, **node_options: object) -> Child:
        """Starts "prefill-N" or "decode-N", also one that ended; returns when it listens.

        node_options go before the cluster's.
        """
        options = {"coordinator": self.address, "node_id": name, "listen": "127.0.0.1:0"}
        child = self._spawn(name, options | self._node_options | node_options)
        await child.read_address()
        return child

    async def wait_serving(self) -> None:
        """Returns when every node that runs is SERVING. Raises ChildFailed when one ends first."""
        running = [child for child in self.processes.values() if child.is_alive]
        missing = [child for child in running if child.name != COORDINATOR]
        try:
            async with asyncio.timeout(self._start_timeout_s), AsyncClient(self.address) as client:
                while missing := await self._not_serving(client, missing):
                    await _raise_on_exit(running, timeout_s=_LOOK_INTERVAL_S)
        except TimeoutError as error:
            raise missing[0].failure(f"is not serving after {self._start_timeout_s:g} s") from error

    async def wait_exit(self) -> None:
        """Lasts until a program ends by itself, and raises ChildFailed that says which and how."""
        await _raise_on_exit(list(self.processes.values()), timeout_s=None)

    async def stop(self) -> None:
        """Stops every program and waits for it. May be called again."""
        children = [child for child in self.processes.values() if child.is_alive]
        if not children:
            return
        for child in children:
            child.terminate()
        exits = [child.exited for child in children]
        try:
            await asyncio.wait(exits, timeout=self._stop_timeout_s)
        finally:  # also when this wait is cancelled: a second Ctrl-C is impatience
            for child in children:
                child.kill()
        await asyncio.wait(exits, timeout=_REAP_TIMEOUT_S)

    async def _not_serving(self, client: AsyncClient, children: Sequence[Child]) -> list[Child]:
        try:
            nodes = await client.list_nodes()
        except GenerationError:  # a coordinator that is gone shows in its exit
            nodes = []
        for node in nodes:
            self._on_loaded(f"loading {node.node_id}", node.loaded_percent, 100)
        # By address too: a node that was started again is not the one that is still listed.
        serving = {(node.node_id, node.address) for node in nodes if node.state == "serving"}
        return [child for child in children if (child.node_id, child.address) not in serving]

    def _spawn(self, name: str, options: Mapping[str, object]) -> Child:
        program = self._programs[name.partition("-")[0]]
        log_path = self._log_dir / f"{name}.log" if self._log_dir else None
        command = [*program, *_flags(options), "--exit-with-parent"]
        self.processes[name] = Child(name, command, log_path=log_path)
        return self.processes[name]

    def _start_failure(self) -> ChildFailed:
        children = list(self.processes.values())
        silent = [child for child in children if not child.address] or children
        return silent[0].failure(f"does not listen after {self._start_timeout_s:g} s")


async def _raise_on_exit(children: Sequence[Child], *, timeout_s: float | None) -> None:
    by_exit = {child.exited: child for child in children}
    done, _ = await asyncio.wait(by_exit, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for exited in done:
        raise by_exit[exited].failure(describe_exit(exited.result()))


def _flags(options: Mapping[str, object]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(str(value))
    return flags
