"""The Python client.

    with Client("127.0.0.1:50051") as client:
        for event in client.generate([{"role": "user", "content": "Hi"}], max_tokens=32):
            if isinstance(event, Delta):
                print(event.text, end="")

AsyncClient is the client; Client runs one on an event loop of its own, step by step. A generation
is one gRPC call that lives as long as its iterator: leaving the loop cancels it on the server.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Self, Unpack

import grpc.aio

from coordinator.events import (
    Delta,
    Finished,
    GenerationError,
    GenerationOptions,
    Node,
    Prompt,
    build_request,
    read_event,
    read_generation_error,
    read_node,
)
from protos.pd.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2_grpc
from protos.serving import dial

_LIST_TIMEOUT_S = 10.0


class AsyncClient:
    """A connection to one coordinator, for one event loop. Made and used while that loop runs."""

    def __init__(self, address: str) -> None:
        self._channel = dial(address, purpose="client")
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[Delta | Finished, None]:
        """Streams a generation: Deltas, then one Finished.

        A string is sent as plain text, a list of messages through the model's chat template.
        timeout_s is the deadline of the whole call; the server sets one where it is None. Raises
        GenerationError when the call fails, ValueError for an option that cannot be sent.
        """
        request = build_request(prompt, options)
        call = self._generation.Generate(request, timeout=timeout_s)
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

    async def list_nodes(self) -> list[Node]:
        """The nodes of the cluster. Raises GenerationError when the call fails."""
        try:
            answer = await self._cluster.ListNodes(
                cluster_pb2.ListNodesRequest(), timeout=_LIST_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise read_generation_error(error) from error
        return [read_node(info) for info in answer.nodes]

    async def close(self) -> None:
        """Cancels what is open and drops the connection."""
        await self._channel.close()

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

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(_connect(address))
        self._is_closed = False

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[Delta | Finished, None, None]:
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


async def _connect(address: str) -> AsyncClient:
    return AsyncClient(address)


async def _next(events: AsyncGenerator[Delta | Finished, None]) -> Delta | Finished | None:
    return await anext(events, None)
