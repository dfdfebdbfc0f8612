"""One request on one pair of nodes: both calls, merged into one order of events.

    Decode:  start -> Reserved -> remote | local -> Sealed, tokens...
    Prefill: (target) -> FirstToken, Shipped
         events: RESERVED, cache hits, runs of tokens (first, sealed, decoded), to the last of
                 every choice

The Decode stream is the truth: once it is sealed, an error of the prefill call does not matter.
release() cancels both calls, and that is all it takes to free both nodes. It happens when the
events are closed, and at the deadline, whether or not anybody reads the events then.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

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
# A decode node that answers so has started nothing: the request may wait for its next status.
_TRY_LATER = (Reason.BLOCKS_EXHAUSTED, Reason.NOT_READY)

# What grpc.aio makes of a call that ends while a message is written to it: its own status is lost.
_ENDED_UNDER_A_WRITE = "Internal error from Core"


class Stage(Enum):
    """What happened besides tokens."""

    RESERVED = "reserved"
    SEALED = "sealed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHit:
    """So many leading tokens were there already, as the node itself tells.

    On a prefill node they are not computed; on a decode node not shipped, or if the prompt is
    prefilled there not computed either.
    """

    side: Literal["prefill", "decode"]
    num_tokens: int
    saves_compute: bool


Event = Stage | CacheHit | types_pb2.TokenRun | types_pb2.PromptLogprobs


class Refused(Exception):
    """The decode node has no room now; nothing was started."""


class Attempt:
    """The calls of one try to serve sequence on the claim's pair, until deadline (monotonic)."""

    def __init__(
        self,
        claim: Claim,
        sequence: types_pb2.Sequence,
        *,
        channels: NodeChannels,
        deadline: float,
    ) -> None:
        self._claim = claim
        self._sequence = sequence
        self._channels = channels
        self._timeout_s = max(0.0, deadline - time.monotonic())
        self._events: asyncio.Queue[Event | types_pb2.Target | Exception] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_EVENTS)
        self._calls: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_sealed = False
        listed = {progress.choice for progress in sequence.choices}
        self._unfinished = listed or set(range(max(1, sequence.num_choices)))

    async def events(self) -> AsyncGenerator[Event, None]:
        """Everything in order, until every choice has ended. Raises ServingError, and Refused
        before the first event."""
        prefill, decode = self._claim.pair.prefill, self._claim.pair.decode
        nodes = [node for node in (prefill, decode) if node is not None]
        for node in nodes:
            node.on_lost.add(self._node_lost)
        expiry = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        try:
            if decode is not None:
                self._start(self._decode(decode))
            elif prefill is not None:
                self._start(self._prefill(prefill, None))
            while True:
                event = await self._events.get()
                self._room.release()
                if isinstance(event, Exception):
                    raise await self._cause(event)
                if isinstance(event, types_pb2.Target):
                    if prefill is not None:
                        self._start(self._prefill(prefill, event))
                    yield Stage.RESERVED
                    event = CacheHit(
                        side="decode",
                        num_tokens=event.num_cached_tokens,
                        saves_compute=prefill is None,
                    )
                yield event
                if isinstance(event, types_pb2.TokenRun) and event.finish_reason:
                    self._unfinished.discard(event.choice)
                    if not self._unfinished:
                        return
        finally:
            expiry.cancel()
            for node in nodes:
                node.on_lost.discard(self._node_lost)
            self._release()

    async def _decode(self, decode: NodeEntry) -> None:
        call = self._channels.decode(decode).Decode(timeout=self._timeout_s)
        self._calls.append(call)
        try:
            await call.write(decode_pb2.DecodeRequest(start=self._sequence))
            await call.write(self._how_to_prefill())
            await call.done_writing()
            while (response := await call.read()) is not grpc.aio.EOF:
                match response.WhichOneof("event"):
                    case "reserved":
                        await self._put(self._reserved(decode, response.reserved))
                    case "sealed":
                        self._is_sealed = True
                        await self._put(Stage.SEALED)
                        for run in response.sealed.runs:
                            await self._put(run)
                    case "tokens":
                        await self._put(response.tokens)
                    case "prompt_logprobs":
                        await self._put(response.prompt_logprobs)
            self._fail(ServingError(Reason.INTERNAL, f"{decode.key} ended early"))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            failure = await self._node_error(call, error, decode)
            if failure.reason not in _TRY_LATER:
                self._fail(failure)
            else:
                decode.refused_seq = decode.status_seq
                self._fail(Refused())

    async def _node_error(self, call: Any, error: Exception, node: NodeEntry) -> ServingError:
        failure = await _node_error(call, error, node)
        if failure.reason is Reason.NODE_LOST:
            self._claim.avoid(node)
        return failure

    def _reserved(self, decode: NodeEntry, reserved: decode_pb2.Reserved) -> types_pb2.Target:
        decode.num_broken = 0
        if reserved.status_seq > decode.status_seq:
            decode.status_seq = reserved.status_seq
            decode.available_blocks = reserved.available_blocks
            decode.num_running += 1
        self._claim.let_go(decode=True)
        return reserved.target

    def _how_to_prefill(self) -> decode_pb2.DecodeRequest:
        pair = self._claim.pair
        if pair.prefill is None:
            return decode_pb2.DecodeRequest(local=decode_pb2.Local(reason=pair.reason))
        remote = decode_pb2.Remote(prefill=node_to_pb(pair.prefill.key))
        return decode_pb2.DecodeRequest(remote=remote)

    async def _prefill(self, prefill: NodeEntry, target: types_pb2.Target | None) -> None:
        request = prefill_pb2.PrefillRequest(sequence=self._sequence, target=target)
        call = self._channels.prefill(prefill).Prefill(request, timeout=self._timeout_s)
        self._calls.append(call)
        try:
            async for response in call:
                prefill.num_broken = 0
                match response.WhichOneof("event"):
                    case "prompt_logprobs":
                        await self._put(response.prompt_logprobs)
                    case "first_token":
                        num_cached = response.first_token.num_cached_tokens
                        await self._put(
                            CacheHit(side="prefill", num_tokens=num_cached, saves_compute=True)
                        )
                for run in response.first_token.runs:
                    await self._put(run)
        except grpc.aio.AioRpcError as error:
            if not self._is_sealed:
                self._fail(await self._node_error(call, error, prefill))
        finally:
            self._claim.let_go(prefill=True)

    async def _put(self, event: Event | types_pb2.Target) -> None:
        await self._room.acquire()
        self._events.put_nowait(event)

    def _fail(self, error: Exception) -> None:
        self._events.put_nowait(error)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))

    def _node_lost(self) -> None:
        pair = self._claim.pair
        if self._is_sealed and pair.decode is not None and not pair.decode.is_lost:
            return
        for node in (pair.prefill, pair.decode):
            if node is not None and node.is_lost:
                self._fail(ServingError(Reason.NODE_LOST, f"lost {node.key}", node=node.key))

    def _expire(self) -> None:
        self._release()
        self._fail(ServingError(Reason.DEADLINE_EXCEEDED, "the deadline has passed"))

    def _release(self) -> None:
        for task in self._tasks:
            task.cancel()
        for call in self._calls:
            call.cancel()
        self._claim.let_go(decode=True, prefill=True)

    async def _cause(self, error: Exception) -> Exception:
        """The error to report: what is behind it, if that is about to arrive."""
        if not isinstance(error, ServingError):
            return error
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
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return ServingError(Reason.NODE_LOST, f"lost {node.key}", node=node.key)
        case grpc.StatusCode.INTERNAL if error.details() == _ENDED_UNDER_A_WRITE:
            return ServingError(Reason.NODE_LOST, f"{node.key} hung up", node=node.key)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return ServingError(Reason.DEADLINE_EXCEEDED, "the deadline has passed")
    return ServingError(
        Reason.INTERNAL, f"{node.key}: {error.code().name} {error.details()}", node=node.key
    )
