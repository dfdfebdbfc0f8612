"""Servers that are compared on the same cores: one is awake, the others are frozen.

    Served(deployment)   a cluster of ours, started and pinned here
    Outside(url)         a server that somebody else has started, frozen if its pid is known

    async with Served(...) as contender:       started, then frozen
        async with contender.awake():          measure at contender.open_target()

An idle server still uses the cores (heartbeats, watchdogs, spinning executors), so all programs of
a cluster are stopped (SIGSTOP), the coordinator too. When they wake after its 3 s of silence, the
coordinator takes its nodes out and they register again within a second: waking waits for that. The
first requests after a wake rebuild lanes and fetch pages; they are the measurer's warm-up.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from bench.deployment import Deployment
from bench.targets import OpenAITarget, OurTarget, pin
from coordinator.supervisor import Cluster
from engine.catalog import resolve_model

_NOTICE_S = 0.25


class Served:
    """A cluster of ours: an async context. kv_memory_gb is shared by all its nodes; they get cores
    of their own from the first on, as every other contender's do, where there are enough."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        model: str,
        kv_memory_gb: float,
        log_dir: Path,
        name: str = "",
    ) -> None:
        self.name = name or deployment.name
        self._deployment = deployment
        self._log_dir = log_dir
        self._cluster = Cluster(
            model=model,
            num_prefill=deployment.num_prefill,
            num_decode=deployment.num_decode,
            node_options=deployment.node_options(kv_memory_gb=kv_memory_gb),
            log_dir=log_dir,
        )
        self._is_pinned = not is_emulated(model)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        await self._stack.enter_async_context(self._cluster)
        if self._is_pinned:
            pin(self._cluster, threads=self._deployment.threads)
        self._signal(signal.SIGSTOP)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Frozen programs hear no SIGTERM; the cluster thaws each as it stops it.
        await self._stack.aclose()

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Serving within the block, frozen outside of it."""
        self._signal(signal.SIGCONT)
        try:
            # The coordinator's list is of before the freeze until its overdue timers have run.
            await asyncio.sleep(_NOTICE_S)
            await self._cluster.wait_serving()
            yield
        finally:
            self._signal(signal.SIGSTOP)

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._cluster.processes.values()]

    def open_target(self) -> OurTarget:
        return OurTarget(self.address)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._cluster.processes.values():
            child.send_signal(number)


class Outside:
    """A running OpenAI-compatible server. With pids, they and their children are frozen outside of
    awake(), and thawed for good in the end: an async context too."""

    def __init__(self, url: str, *, model: str, pids: Sequence[int] = ()) -> None:
        self.name = url
        self._model = model
        self._pids = pids

    async def __aenter__(self) -> Self:
        self._signal(signal.SIGSTOP)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._signal(signal.SIGCONT)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Running within the block, frozen outside of it."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def open_target(self) -> OpenAITarget:
        return OpenAITarget(self.name, model=self._model)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                process.send_signal(number)


# What is measured while it is awake: enter, awake(), open_target().
Contender = Served | Outside


def is_emulated(model: str) -> bool:
    """Whether nodes of this model only say how long steps would take. Raises ValueError."""
    folder = resolve_model(model, allow_download=False).folder
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return "cost_profile" in config
