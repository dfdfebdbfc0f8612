"""How busy each node of a cluster is during a run.

    async with NodeUse(client, metrics=...) as use:  ... run ...   use.shares() -> {node: {...}}

Of nodes whose metrics can be read, time in steps is what they say themselves. Others are seen
through the coordinator only, every 500 ms: the share of looks with a step in progress estimates the
share of time, within about 0.1 after 60 looks.
"""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import httpx

from coordinator.client import AsyncClient
from coordinator.events import GenerationError, Node

_LOOK_INTERVAL_S = 0.5
_SCRAPE_TIMEOUT_S = 5.0
_COMPUTE_S = re.compile(r"^disagg_engine_compute_seconds_total (\S+)$", re.MULTILINE)


class NodeUse:
    """Looks at all nodes for the time of the block. metrics: host:port by node, as far as known."""

    def __init__(self, client: AsyncClient, *, metrics: Mapping[str, str]) -> None:
        self._client = client
        self._metrics = metrics
        self._seen: dict[str, list[Node]] = defaultdict(list)
        self._computed_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        self._began_s, self._before_s = time.monotonic(), await self._read_compute_s()
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._looking.cancel()
        await asyncio.wait([self._looking])
        self._wall_s, after_s = time.monotonic() - self._began_s, await self._read_compute_s()
        for name in self._before_s.keys() & after_s.keys():
            self._computed_s[name] = after_s[name] - self._before_s[name]

    def shares(self) -> dict[str, dict[str, float]]:
        """By node: time in steps, blocks in use (mean and most), mean numbers of requests that run
        and wait, steps."""
        found = {name: _summarise(looks) for name, looks in sorted(self._seen.items())}
        for name, computed_s in self._computed_s.items():
            if name in found:
                found[name]["busy_share"] = computed_s / self._wall_s
        return found

    async def _read_compute_s(self) -> dict[str, float]:
        """Of the nodes that answer."""
        found = {}
        async with httpx.AsyncClient(timeout=_SCRAPE_TIMEOUT_S, trust_env=False) as client:
            for name, address in self._metrics.items():
                try:
                    text = (await client.get(f"http://{address}/metrics")).text
                except httpx.HTTPError:
                    continue
                if match := _COMPUTE_S.search(text):
                    found[name] = float(match[1])
        return found

    async def _look(self) -> None:
        while True:
            try:
                for node in await self._client.list_nodes():
                    self._seen[node.node_id].append(node)
            except GenerationError:
                pass  # under overload, or while it restarts: a look that is missing
            await asyncio.sleep(_LOOK_INTERVAL_S)


def _summarise(looks: list[Node]) -> dict[str, float]:
    used = [1 - node.available_blocks / max(node.num_blocks, 1) for node in looks]
    return {
        "busy_share": sum(node.step_predicted_s is not None for node in looks) / len(looks),
        "blocks_used_share": sum(used) / len(used),
        "blocks_used_share_max": max(used),
        "mean_running": sum(node.num_running for node in looks) / len(looks),
        "mean_queued": sum(node.num_queued for node in looks) / len(looks),
        "num_steps": looks[-1].num_steps - looks[0].num_steps,
    }
