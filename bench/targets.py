"""What can be put under load: our cluster, and any server with OpenAI's completions API."""

import json
import os
import time
from collections.abc import Sequence

import httpx

from bench.load import Tokens
from coordinator.client import AsyncClient
from coordinator.events import Delta, Finished
from coordinator.supervisor import Cluster


class OurTarget:
    """A coordinator at address."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> Tokens:
        stamps: list[float] = []
        gap_s = None
        async for event in self._client.generate(prompt, max_tokens=num_tokens, ignore_eos=True):
            if isinstance(event, Delta):
                stamps += [time.monotonic()] * len(event.token_ids)
            elif isinstance(event, Finished):
                gap_s = event.timing.handoff_gap_s
        return Tokens(stamps=stamps, handoff_gap_s=gap_s)

    async def close(self) -> None:
        await self._client.close()


class OpenAITarget:
    """A server at url with streaming /v1/completions that takes prompts as token ids.

    A chunk of several tokens is counted by the usage at the end: all are stamped with its time.
    """

    def __init__(self, url: str, *, model: str) -> None:
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._model = model
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(timeout=600, limits=limits, trust_env=False)

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> Tokens:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stamps: list[float] = []
        usage: dict[str, int] = {}
        async with self._client.stream("POST", self._url, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line[5:])
                usage = event.get("usage") or usage
                if event.get("choices"):
                    stamps.append(time.monotonic())
        missing = usage.get("completion_tokens", len(stamps)) - len(stamps)
        return Tokens(stamps=stamps + stamps[-1:] * missing)

    async def close(self) -> None:
        await self._client.aclose()


def pin(cluster: Cluster, *, threads: int) -> None:
    """Gives each node cores of its own, in order, as far as there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    nodes = [child for name, child in cluster.processes.items() if name != "coordinator"]
    if threads * len(nodes) > len(cores):
        print(f"{len(nodes)} nodes of {threads} threads on {len(cores)} cores: not pinned")
        return
    for index, child in enumerate(nodes):
        own = set(cores[index * threads : (index + 1) * threads])
        for task in os.listdir(f"/proc/{child.pid}/task"):
            os.sched_setaffinity(int(task), own)
