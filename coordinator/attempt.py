"""One request on one pair of nodes: both calls, merged into one order of events.

    Decode:  start -> Reserved -> remote | local -> Sealed, tokens...
    Prefill: (target) -> FirstToken, Shipped
         events: RESERVED, runs of tokens (first, sealed, decoded), to the one that is the last

The Decode stream is the truth: once it is sealed, an error of the prefill call does not matter.
Closing the generator cancels both calls, and that is all it takes to free both nodes.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from enum import Enum
from typing import Any

import grpc.aio

from coordinator.node_channels import NodeChannels
from coordinator.queue import Claim
from coordinator.registry import NodeEntry
from kvtransfer.wire import node_to_pb
from protos.errors import Reason, ServingError, read_error
from protos.pd.v1 import decode_pb2, prefill_pb2, types_pb2

# A slow client stops the nodes' streams, and does not fill this process's memory.
MAX_EVENTS = 64
# An aborted transfer is a consequence; its cause is on its way.
CAUSE_WAIT_S = 0.5


class Stage(Enum):
    """What happened besides tokens."""

    RESERVED = "reserved"
    SEALED = "sealed"


Event = Stage | types_pb2.TokenRun


class Refused(Exception):
    """The decode node has no room now; nothing was started."""


class Attempt:
    """The calls of one try to serve sequence on the claim's pair, within timeout_s."""

    def __init__(
        self,
        claim: Claim,
        sequence: types_pb2.Sequence,
        *,
        channels: NodeChannels,
        timeout_s: float,
    ) -> None:
        self._claim = claim
        self._sequence = sequence
        self._channels = channels
        self._timeout_s = timeout_s
        self._events: asyncio.Queue[Event | ServingError] = asyncio.Queue(MAX_EVENTS)
        self._calls: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_sealed = False

    async def events(self) -> AsyncGenerator[Event, None]:
        """Everything in order, to the run that ends the generation. Raises ServingError, and
        Refused before the first event."""
        pair = self._claim.pair
        nodes = [node for node in (pair.prefill, pair.decode) if node is not None]
        for node in nodes:
            node.on_lost.add(self._node_lost)
        try:
            target = None
            if pair.decode is not None:
                target = await self._reserve(pair.decode)
                yield Stage.RESERVED
            if pair.prefill is not None:
                self._start(self._prefill(pair.prefill, target))
            while True:
                event = await self._events.get()
                if isinstance(event, ServingError):
                    raise await self._cause(event)
                yield event
                if isinstance(event, types_pb2.TokenRun) and event.finish_reason:
                    return
        finally:
            for node in nodes:
                node.on_lost.discard(self._node_lost)
            for task in self._tasks:
                task.cancel()
            for call in self._calls:
                call.cancel()
            self._claim.let_go(decode=True, prefill=True)

    async def _reserve(self, decode: NodeEntry) -> types_pb2.Target:
        """Starts the Decode call as far as its reservation."""
        call = self._channels.decode(decode).Decode(timeout=self._timeout_s)
        self._calls.append(call)
        try:
            await call.write(decode_pb2.DecodeRequest(start=self._sequence))
            response = await call.read()
            if response is grpc.aio.EOF:
                raise ServingError(Reason.INTERNAL, f"{decode.key} ended without an answer")
            await call.write(self._how_to_prefill())
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            failure = await _node_error(call, error, decode)
            if failure.reason is not Reason.BLOCKS_EXHAUSTED:
                raise failure from error
            decode.refused_seq = decode.status_seq
            raise Refused from error
        reserved = response.reserved
        if reserved.status_seq > decode.status_seq:
            decode.status_seq = reserved.status_seq
            decode.available_blocks = reserved.available_blocks
            decode.num_running += 1
        self._claim.let_go(decode=True)
        self._start(self._decode(call, decode))
        target: types_pb2.Target = reserved.target
        return target

    def _how_to_prefill(self) -> decode_pb2.DecodeRequest:
        pair = self._claim.pair
        if pair.prefill is None:
            return decode_pb2.DecodeRequest(local=decode_pb2.Local(reason=pair.reason))
        remote = decode_pb2.Remote(prefill=node_to_pb(pair.prefill.key))
        return decode_pb2.DecodeRequest(remote=remote)

    async def _decode(self, call: Any, decode: NodeEntry) -> None:
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.WhichOneof("event") == "sealed":
                    self._is_sealed = True
                    await self._events.put(Stage.SEALED)
                    for run in response.sealed.runs:
                        await self._events.put(run)
                else:
                    await self._events.put(response.tokens)
        except grpc.aio.AioRpcError as error:
            await self._events.put(await _node_error(call, error, decode))
        else:
            await self._events.put(ServingError(Reason.INTERNAL, f"{decode.key} ended early"))

    async def _prefill(self, prefill: NodeEntry, target: types_pb2.Target | None) -> None:
        request = prefill_pb2.PrefillRequest(sequence=self._sequence, target=target)
        call = self._channels.prefill(prefill).Prefill(request, timeout=self._timeout_s)
        self._calls.append(call)
        try:
            async for response in call:
                for run in response.first_token.runs:
                    await self._events.put(run)
        except grpc.aio.AioRpcError as error:
            if not self._is_sealed:
                await self._events.put(await _node_error(call, error, prefill))
        finally:
            self._claim.let_go(prefill=True)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))

    def _node_lost(self) -> None:
        pair = self._claim.pair
        if self._is_sealed and pair.decode is not None and not pair.decode.is_lost:
            return
        lost = [node for node in (pair.prefill, pair.decode) if node is not None and node.is_lost]
        error = ServingError(Reason.NODE_LOST, f"lost {lost[0].key}", node=lost[0].key)
        self._start(self._events.put(error))

    async def _cause(self, error: ServingError) -> ServingError:
        if error.reason not in (Reason.TRANSFER_ABORTED, Reason.LANE_LOST):
            return error
        try:
            async with asyncio.timeout(CAUSE_WAIT_S):
                while True:
                    event = await self._events.get()
                    if isinstance(event, ServingError):
                        return event
        except TimeoutError:
            return error


async def _node_error(call: Any, error: Exception, node: NodeEntry) -> ServingError:
    """What the node said, or that it is lost."""
    if not isinstance(error, grpc.aio.AioRpcError):
        # A write to a call that has ended already; its status says why.
        error = grpc.aio.AioRpcError(
            await call.code(),
            await call.initial_metadata(),
            await call.trailing_metadata(),
            await call.details(),
        )
    ours = read_error(error)
    if ours is not None:
        return ours
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return ServingError(Reason.NODE_LOST, f"lost {node.key}", node=node.key)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return ServingError(Reason.DEADLINE_EXCEEDED, "the deadline has passed")
    return ServingError(
        Reason.INTERNAL, f"{node.key}: {error.code().name} {error.details()}", node=node.key
    )
