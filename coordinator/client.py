"""The Python client.

    with Client("127.0.0.1:50051") as client:
        for event in client.generate([{"role": "user", "content": "Hi"}], max_tokens=32):
            if isinstance(event, Delta):
                print(event.text, end="")

AsyncClient is the client; Client runs one on an event loop of its own, step by step. A generation
is one gRPC call that lives as long as its iterator: leaving the loop cancels it on the server.
With several addresses it is as many calls as it takes, one at a time.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc.aio

from coordinator.delivered import Delivered
from coordinator.events import (
    Delta,
    Finished,
    GenerationError,
    GenerationOptions,
    Node,
    Prompt,
    PromptLogprobs,
    TimelineEvent,
    build_request,
    read_event,
    read_generation_error,
    read_node,
)
from coordinator.model_info import ModelInfo, read_model_info
from protos.pd.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from protos.serving import dial

_CALL_TIMEOUT_S = 10.0


class AsyncClient:
    """Connections to one coordinator, or to several that front the same nodes, for one event loop.

    With several, what one of them does not answer is sent to the next; a generation goes on
    where it was, because the same request with the same seed has the same tokens. Made and used
    while the loop runs. Raises ValueError for no address.
    """

    def __init__(self, address: str | Sequence[str]) -> None:
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses:
            raise ValueError("a client needs the address of a coordinator")
        self._channels = [dial(one, purpose="client") for one in addresses]
        self._current = 0

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[Delta | PromptLogprobs | Finished, None]:
        """Streams a generation: Deltas, then one Finished.

        A string is sent as plain text, a list of messages through the model's chat template.
        timeout_s is the deadline of the whole call; the server sets one where it is None. Raises
        GenerationError when the call fails, with several addresses when none of them brought
        anything new in one round; ValueError for an option that cannot be sent.
        """
        if len(self._channels) > 1 and options.get("seed") is None:
            options["seed"] = secrets.randbits(63)
        request = build_request(prompt, options)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        delivered = Delivered()
        index, num_fruitless, left_s = self._current, 0, timeout_s
        while True:
            delivered.begin()
            try:
                async with aclosing(self._generate(index, request, timeout_s=left_s)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            yield event
                            return
                        new = delivered.new(event)
                        if new is not None:
                            # Not for what it repeats: a request that ends every coordinator at
                            # the same token must not go round for ever.
                            num_fruitless = 0
                            yield new
            except GenerationError as error:
                num_fruitless += 1
                if not _is_gone(error) or num_fruitless >= len(self._channels):
                    raise
                index = self._leave(index)
                if deadline is not None:
                    left_s = max(0.0, deadline - time.monotonic())

    async def _generate(
        self, index: int, request: Any, *, timeout_s: float | None
    ) -> AsyncGenerator[Delta | PromptLogprobs | Finished, None]:
        stub = generation_pb2_grpc.GenerationServiceStub(self._channels[index])
        call = stub.Generate(request, timeout=timeout_s)
        is_finished = False
        try:
            async for response in call:
                event = read_event(response)
                is_finished = isinstance(event, Finished)
                yield event
        except grpc.aio.AioRpcError as error:
            raise read_generation_error(error) from error
        finally:
            call.cancel()
        if not is_finished:
            raise GenerationError(grpc.StatusCode.UNKNOWN, "", "the answer has no end", {})

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or of chat messages through the model's template."""
        whole = build_request(prompt, {})
        request = generation_pb2.TokenizeRequest()
        if whole.WhichOneof("prompt") == "chat":
            request.chat.CopyFrom(whole.chat)
        else:
            request.text = whole.text
        answer = await self._call(lambda stubs: stubs.generation.Tokenize, request)
        return list(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
        answer = await self._call(lambda stubs: stubs.generation.Detokenize, request)
        return str(answer.text)

    async def get_model(self) -> ModelInfo:
        """The model that is served, and the limits of a request to it."""
        request = generation_pb2.GetModelRequest()
        return read_model_info(await self._call(lambda stubs: stubs.generation.GetModel, request))

    async def explain(self, request_id: str) -> list[TimelineEvent]:
        """What happened to a request that runs, or has ended not long ago.

        Each coordinator knows its own part of it only; the one that is in use is asked.
        """
        request = generation_pb2.ExplainRequest(request_id=request_id)
        answer = await self._call(lambda stubs: stubs.generation.Explain, request)
        return [
            TimelineEvent(
                at_s=event.at.ToNanoseconds() / 1e9, what=event.what, details=dict(event.details)
            )
            for event in answer.events
        ]

    async def drain_node(self, node_id: str) -> None:
        """Makes a node stop: it gets nothing new, what runs ends or moves, its process exits."""
        request = cluster_pb2.DrainNodeRequest(node_id=node_id)
        await self._call(lambda stubs: stubs.cluster.DrainNode, request)

    async def clear_cache(self, node_id: str) -> None:
        """Makes a node forget all prefixes that it has cached."""
        request = cluster_pb2.ClearCacheRequest(node_id=node_id)
        await self._call(lambda stubs: stubs.cluster.ClearCache, request)

    async def list_nodes(self) -> list[Node]:
        """The nodes of the cluster. Raises GenerationError when the call fails."""
        request = cluster_pb2.ListNodesRequest()
        answer = await self._call(lambda stubs: stubs.cluster.ListNodes, request)
        return [read_node(info) for info in answer.nodes]

    async def _call(self, method: Callable[["_Stubs"], Any], request: Any) -> Any:
        """A unary call, to the first coordinator that answers. Raises GenerationError."""
        index, deadline = self._current, time.monotonic() + _CALL_TIMEOUT_S
        for num_left in reversed(range(len(self._channels))):
            left_s = max(0.0, deadline - time.monotonic())
            try:
                return await method(_Stubs(self._channels[index]))(request, timeout=left_s)
            except grpc.aio.AioRpcError as error:
                failure = read_generation_error(error)
                if not _is_gone(failure) or not num_left:
                    raise failure from error
                index = self._leave(index)
        raise AssertionError("a client has an address")

    def _leave(self, index: int) -> int:
        """The address after one that is gone; new calls begin there.

        Each call walks by itself: those that broke together would else send each other back.
        """
        following = (index + 1) % len(self._channels)
        if self._current == index:
            self._current = following
        return following

    async def close(self) -> None:
        """Cancels what is open and drops the connection."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class Client:
    """AsyncClient for code without an event loop. One thread; Ctrl-C ends the call in progress."""

    def __init__(self, address: str | Sequence[str]) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(_connect(address))
        self._is_closed = False

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[Delta | PromptLogprobs | Finished, None, None]:
        """As AsyncClient.generate."""
        events = self._client.generate(prompt, timeout_s=timeout_s, **options)
        try:
            while (event := self._runner.run(_next(events))) is not None:
                yield event
        finally:
            if not self._is_closed:  # close() has ended the call otherwise
                self._runner.run(events.aclose())

    def list_nodes(self) -> list[Node]:
        """As AsyncClient.list_nodes."""
        return self._runner.run(self._client.list_nodes())

    def tokenize(self, prompt: Prompt) -> list[int]:
        """As AsyncClient.tokenize."""
        return self._runner.run(self._client.tokenize(prompt))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """As AsyncClient.detokenize."""
        return self._runner.run(self._client.detokenize(token_ids))

    def get_model(self) -> ModelInfo:
        """As AsyncClient.get_model."""
        return self._runner.run(self._client.get_model())

    def explain(self, request_id: str) -> list[TimelineEvent]:
        """As AsyncClient.explain."""
        return self._runner.run(self._client.explain(request_id))

    def drain_node(self, node_id: str) -> None:
        """As AsyncClient.drain_node."""
        self._runner.run(self._client.drain_node(node_id))

    def clear_cache(self, node_id: str) -> None:
        """As AsyncClient.clear_cache."""
        self._runner.run(self._client.clear_cache(node_id))

    def close(self) -> None:
        """Cancels what is open and drops the connection."""
        if self._is_closed:
            return
        self._is_closed = True
        self._runner.run(self._client.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Stubs:
    """The services of one coordinator."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(channel)


def _is_gone(error: GenerationError) -> bool:
    # CANCELLED is what a coordinator that ends in good order leaves its calls with.
    return error.is_unreachable or error.status is grpc.StatusCode.CANCELLED


async def _connect(address: str | Sequence[str]) -> AsyncClient:
    return AsyncClient(address)


async def _next(
    events: AsyncGenerator[Delta | PromptLogprobs | Finished, None],
) -> Delta | PromptLogprobs | Finished | None:
    return await anext(events, None)
