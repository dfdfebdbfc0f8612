"""What can be put under load: our service, and any server with OpenAI's completions API.

    Target.ask(prompt, num_tokens, chunks)  fills chunks with (monotonic seconds, number of tokens)
                                            as they come --> Ending: outcome, and what was told

A refusal is an answer (no room, no time), anything else that goes wrong a failure; neither raises.
Messages of our API are counted without coordinator/events.py, because the client's time per token
adds to what is measured (bench/generator_check.py).
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
import httpx

from bench.prompts import VOCAB, Prompt, ordinary_tokens
from bench.records import FAILED, OK, REFUSED
from coordinator.client import AsyncClient
from coordinator.events import Finished, build_request, read_event, read_generation_error
from coordinator.supervisor import Cluster
from protos.errors import Reason
from protos.pd.v1 import generation_pb2_grpc
from protos.serving import dial

Chunks = list[tuple[float, int]]
# Beside RESOURCE_EXHAUSTED: the service is there, and says that it takes no request now.
_REFUSING_REASONS = {Reason.NO_NODES.name, Reason.NOT_READY.name}
_REFUSING_HTTP = (429, 503)
# Of one request: longer than any run has patience for.
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a request ended. What a server does not tell is None or empty."""

    outcome: str = OK
    error: str = ""
    queue_s: float | None = None
    transfer_s: float | None = None
    handoff_gap_s: float | None = None
    served_as: str = ""
    prefill_node: str = ""
    decode_node: str = ""
    num_cached: int = 0
    num_prompt_tokens: int | None = None


class Target(Protocol):
    """A server under load; close() when the run is over."""

    async def ask(self, prompt: Prompt, num_tokens: int, chunks: Chunks) -> Ending:
        """Greedy, and past any end-of-sequence token. What is in chunks stands when cancelled."""
        ...

    async def vocab(self) -> range:
        """Ordinary token ids of its model."""
        ...

    async def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer; None where it does not tell."""
        ...

    async def close(self) -> None: ...


class OurTarget:
    """A coordinator at address; metrics are its nodes' (host:port by name), where they are known.

    Raises GenerationError from what is not a request under load.
    """

    def __init__(self, address: str, *, metrics: Mapping[str, str] | None = None) -> None:
        self.client = AsyncClient(address)
        self.metrics = metrics or {}
        self._channel = dial(address, purpose="load")
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def ask(self, prompt: Prompt, num_tokens: int, chunks: Chunks) -> Ending:
        request = build_request(prompt, {"max_tokens": num_tokens, "ignore_eos": True})
        call = self._stub.Generate(request, timeout=_TIMEOUT_S)
        last: Any = None
        try:
            async for response in call:
                now = time.monotonic()
                count = len(response.delta.token_ids)
                if count:
                    chunks.append((now, count))
                else:
                    last = response
        except grpc.aio.AioRpcError as error:
            return _read_rpc_error(error, has_begun=bool(chunks))
        finally:
            call.cancel()
        finished = None if last is None else read_event(last)
        if not isinstance(finished, Finished):
            return Ending(outcome=FAILED, error="the answer has no end")
        return _told(finished)

    async def vocab(self) -> range:
        return ordinary_tokens((await self.client.get_model()).vocab_size)

    async def max_model_len(self) -> int | None:
        return (await self.client.get_model()).max_model_len or None

    async def close(self) -> None:
        await self._channel.close()
        await self.client.close()


class OpenAITarget:
    """A server at url with streaming /v1/completions that takes prompts as token ids.

    vLLM tells with every chunk how many tokens there have been. Where a server does not, a chunk
    is one token, and where the usage at the end tells of more, some had several: the surplus is
    spread over the chunks after the first, so that tokens per chunk tells of it.
    """

    def __init__(self, url: str, *, model: str, vocab: range = VOCAB) -> None:
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._model = model
        self._vocab = vocab
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits, trust_env=False)

    async def ask(self, prompt: Prompt, num_tokens: int, chunks: Chunks) -> Ending:
        body = {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        try:
            async with self._client.stream("POST", self._url, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    return _read_status(response.status_code, await response.aread())
                usage = await _read_stream(response, chunks)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            return Ending(outcome=FAILED, error=f"{type(error).__name__}: {error}")
        if isinstance(usage, Ending):
            return usage
        spread(chunks, usage.get("completion_tokens", 0))
        details = usage.get("prompt_tokens_details") or {}
        return Ending(
            num_prompt_tokens=usage.get("prompt_tokens"),
            num_cached=details.get("cached_tokens") or 0,
        )

    async def vocab(self) -> range:
        return self._vocab

    async def max_model_len(self) -> int | None:
        return None

    async def close(self) -> None:
        await self._client.aclose()


def spread(chunks: Chunks, num_tokens: int) -> None:
    """Makes the counts of chunks add up to num_tokens, as evenly as can be, later ones first."""
    missing = num_tokens - sum(count for _, count in chunks)
    for back in range(missing if chunks else 0):
        index = -1 - back % max(1, len(chunks) - 1)
        at_s, count = chunks[index]
        chunks[index] = (at_s, count + 1)


def pin(cluster: Cluster, *, threads: int) -> str:
    """Gives each node cores of its own, in order, as far as there are enough. Says what it did."""
    cores = sorted(os.sched_getaffinity(0))
    nodes = {name: child for name, child in cluster.processes.items() if name != "coordinator"}
    if threads * len(nodes) > len(cores):
        return f"not pinned: {len(nodes)} nodes of {threads} threads on {len(cores)} cores"
    told = []
    for index, (name, child) in enumerate(nodes.items()):
        own = cores[index * threads : (index + 1) * threads]
        for task in os.listdir(f"/proc/{child.pid}/task"):
            os.sched_setaffinity(int(task), own)
        told.append(f"{name} on {','.join(map(str, own))}")
    return "; ".join(told)


def _read_rpc_error(error: grpc.aio.AioRpcError, *, has_begun: bool) -> Ending:
    sent = read_generation_error(error)
    is_refusal = (
        sent.status is grpc.StatusCode.RESOURCE_EXHAUSTED or sent.reason in _REFUSING_REASONS
    )
    return Ending(outcome=REFUSED if is_refusal and not has_begun else FAILED, error=str(sent))


def _told(event: Finished) -> Ending:
    return Ending(
        queue_s=event.timing.queue_s,
        transfer_s=event.timing.transfer_s,
        handoff_gap_s=event.timing.handoff_gap_s,
        served_as=event.served_as,
        prefill_node=event.prefill_node,
        decode_node=event.decode_node,
        num_cached=event.cached_tokens,
        num_prompt_tokens=event.prompt_tokens,
    )


def _read_status(status: int, body: bytes) -> Ending:
    outcome = REFUSED if status in _REFUSING_HTTP else FAILED
    return Ending(outcome=outcome, error=f"HTTP {status}: {body[:200].decode(errors='replace')}")


async def _read_stream(response: httpx.Response, chunks: Chunks) -> dict[str, Any] | Ending:
    """The last usage, or the error that the stream told."""
    usage: dict[str, Any] = {}
    async for line in response.aiter_lines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        event = json.loads(line[5:])
        if "error" in event:
            return Ending(outcome=FAILED, error=str(event["error"])[:200])
        usage = event.get("usage") or usage
        if event.get("choices") and (count := _count_new(event, chunks)) > 0:
            chunks.append((time.monotonic(), count))
    return usage


def _count_new(event: dict[str, Any], chunks: Chunks) -> int:
    """Tokens of one event."""
    if usage := event.get("usage"):
        return int(usage["completion_tokens"]) - sum(count for _, count in chunks)
    # Half a character is a token without text; an end without text is no token.
    choice = event["choices"][0]
    return int(bool(choice.get("text")) or not choice.get("finish_reason"))
