"""LaneService: where a decode node lets prefill nodes in.

A lane is opened only by a registered prefill node of the same protocol, with a layout that can be
translated, to this incarnation of this node; what differs is named. A new lane of the same node
replaces the old one: its epoch is higher, its random lane_id is what the data plane must show. Runs
on the event loop.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from prometheus_client import CollectorRegistry

from kvtransfer.blocks import BlockPool
from kvtransfer.grpc_plane import GrpcPlaneReceiver
from kvtransfer.inbox import Inbox, IncomingTransfer
from kvtransfer.incoming_lane import IncomingLane
from kvtransfer.lane_metrics import LaneMetrics
from kvtransfer.layout import KvLayout, first_difference
from kvtransfer.memory import KvMemory
from kvtransfer.messages import NodeKey
from kvtransfer.plane import PlaneError
from kvtransfer.planes import common_plane, slot_bytes
from kvtransfer.receiver import LaneProtocolError
from kvtransfer.wire import (
    layout_from_pb,
    node_from_pb,
    sender_message_from_pb,
)
from protos.errors import Reason, ServingError
from protos.pd.v1 import lane_pb2, lane_pb2_grpc
from protos.serving import PROTOCOL_VERSION, Context, next_message

log = logging.getLogger(__name__)

NUM_SLOTS = 4
HANDSHAKE_DEADLINE_S = 5.0
MAX_SLOT_BYTES = 256 * 1024 * 1024


class LaneServicer(lane_pb2_grpc.LaneServiceServicer):
    """Owner of all incoming lanes, over the planes that this node has.

    is_prefill_node tells whether a node is registered as one, after a short wait for a membership
    that is under way.
    """

    def __init__(
        self,
        *,
        me: NodeKey,
        inbox: Inbox,
        pool: BlockPool,
        memory: KvMemory,
        is_prefill_node: Callable[[NodeKey], Awaitable[bool]],
        planes: Sequence[str],
        metrics: LaneMetrics | None = None,
    ) -> None:
        self._me = me
        self._inbox = inbox
        self._pool = pool
        self._memory = memory
        self._is_prefill_node = is_prefill_node
        self._planes = planes
        self._metrics = metrics or LaneMetrics(CollectorRegistry())
        self._lanes: dict[str, IncomingLane] = {}
        self._last_epoch = 0

    def abort(self, transfer: IncomingTransfer, reason: str) -> None:
        """Ends an expected transfer, on its lane if it has one. Nothing if it is over."""
        lane = self._lanes.get(transfer.sender.node_id) if transfer.sender else None
        if lane is not None and lane.sender == transfer.sender:
            lane.abort(transfer, reason)
        else:
            self._inbox.end(transfer, reason)

    def forget(self, members: set[NodeKey]) -> None:
        """Ends lanes from nodes that are no members any more."""
        for lane in list(self._lanes.values()):
            if lane.sender not in members:
                lane.fail(f"{lane.sender} is no member any more")

    def close(self) -> None:
        for lane in list(self._lanes.values()):
            lane.close("node stops")

    async def Lane(
        self, requests: AsyncIterator[lane_pb2.LaneRequest], context: Context
    ) -> AsyncIterator[lane_pb2.LaneResponse]:
        hello = (await next_message(requests, timeout_s=HANDSHAKE_DEADLINE_S)).hello
        theirs = await self._admit(hello)
        lane = self._open(hello, theirs)
        log.info("lane from %s open epoch=%d plane=%s", lane.sender, lane.epoch, lane.plane_name)
        listening = asyncio.create_task(self._listen(lane, requests))
        try:
            yield lane_pb2.LaneResponse(welcome=self._welcome(lane))
            while (response := await lane.outbox.get()) is not None:
                yield response
            raise ServingError(Reason.LANE_LOST, str(lane.failure), node=self._me)
        finally:
            listening.cancel()
            await asyncio.wait([listening])
            lane.close(lane.failure or "lane lost")
            if self._lanes.get(lane.sender.node_id) is lane:
                del self._lanes[lane.sender.node_id]
            self._metrics.lane_ended(reason=str(lane.failure))
            log.info("lane from %s ended epoch=%d reason=%r", lane.sender, lane.epoch, lane.failure)

    async def Plane(
        self, requests: AsyncIterator[lane_pb2.PlaneRequest], context: Context
    ) -> lane_pb2.PlaneResponse:
        lane_id = (await next_message(requests, timeout_s=HANDSHAKE_DEADLINE_S)).lane_id
        lane = next((la for la in self._lanes.values() if la.lane_id == lane_id), None)
        if lane is None or not isinstance(lane.plane, GrpcPlaneReceiver):
            raise ServingError(Reason.LANE_LOST, "no open grpc lane has this id", node=self._me)
        try:
            async for piece in requests:
                if lane.failure is not None:
                    break
                lane.plane.deliver(piece)
        except PlaneError as error:
            lane.fail(str(error))
        finally:
            # The bytes of a granted chunk cannot arrive any more.
            lane.fail("the data plane ended")
        return lane_pb2.PlaneResponse()

    async def _listen(
        self, lane: IncomingLane, requests: AsyncIterator[lane_pb2.LaneRequest]
    ) -> None:
        """Hears the sender out, under the watchdog; then the lane has failed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watchdog = tasks.create_task(lane.watch())
                connecting = tasks.create_task(lane.connect())
                async for request in requests:
                    if request.WhichOneof("event") == "rendezvous":
                        lane.rendezvous(request.rendezvous)
                        continue
                    await connecting
                    message = sender_message_from_pb(request)
                    if message is None:
                        raise LaneProtocolError("a request that has no place here")
                    lane.handle(message)
                watchdog.cancel()
                connecting.cancel()
            lane.fail("the sender ended the stream")
        except* (LaneProtocolError, PlaneError) as errors:
            lane.fail(str(errors.exceptions[0]))
        finally:
            # Whatever it was: a lane that nobody listens to has ended.
            lane.fail("the sender is not heard any more")

    async def _admit(self, hello: lane_pb2.Hello) -> KvLayout:
        """The sender's layout. Raises ServingError, naming what does not fit."""
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ServingError(
                Reason.PROTOCOL_MISMATCH,
                f"protocol version {hello.protocol_version}, this node speaks {PROTOCOL_VERSION}",
            )
        if node_from_pb(hello.receiver) != self._me:
            raise ServingError(
                Reason.UNKNOWN_NODE, f"this is {self._me}, not {node_from_pb(hello.receiver)}"
            )
        sender = node_from_pb(hello.sender)
        if not await self._is_prefill_node(sender):
            raise ServingError(Reason.UNKNOWN_NODE, f"{sender} is not a registered prefill node")
        try:
            theirs = layout_from_pb(hello.layout)
            difference = first_difference(self._memory.layout, theirs)
        except ValueError as error:
            difference = str(error)
        if difference is not None:
            raise ServingError(
                Reason.LAYOUT_MISMATCH,
                f"KV layouts differ in {difference}",
                field=difference.partition(":")[0],
            )
        if self._plane(hello, theirs) is None:
            raise ServingError(
                Reason.PROTOCOL_MISMATCH,
                f"no common plane: this node has {', '.join(self._planes)}",
            )
        if theirs.block_bytes > MAX_SLOT_BYTES:
            raise ServingError(
                Reason.LAYOUT_MISMATCH,
                f"blocks of {theirs.block_bytes} bytes exceed the limit of {MAX_SLOT_BYTES}",
                field="block_size",
            )
        return theirs

    def _plane(self, hello: lane_pb2.Hello, theirs: KvLayout) -> str | None:
        return common_plane(
            hello.planes, self._planes, their_layout=theirs, our_layout=self._memory.layout
        )

    def _open(self, hello: lane_pb2.Hello, theirs: KvLayout) -> IncomingLane:
        """A new lane in place of the sender's previous one."""
        sender = node_from_pb(hello.sender)
        previous = self._lanes.get(sender.node_id)
        if previous is not None:
            previous.close("replaced by a new lane")
        plane = self._plane(hello, theirs)
        assert plane is not None
        self._last_epoch += 1
        lane = IncomingLane(
            sender=sender,
            theirs=theirs,
            lane_id=secrets.token_bytes(16),
            epoch=self._last_epoch,
            plane_name=plane,
            inbox=self._inbox,
            pool=self._pool,
            memory=self._memory,
            num_slots=NUM_SLOTS,
            slot_bytes=slot_bytes(plane, theirs),
            metrics=self._metrics,
        )
        self._metrics.lane_opened(plane=lane.plane_name, epoch=lane.epoch)
        self._lanes[sender.node_id] = lane
        return lane

    def _welcome(self, lane: IncomingLane) -> lane_pb2.Welcome:
        return lane_pb2.Welcome(
            lane_id=lane.lane_id,
            epoch=lane.epoch,
            plane=lane.plane_name,
            num_slots=lane.num_slots,
            slot_bytes=lane.slot_bytes,
        )
