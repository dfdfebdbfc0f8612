"""LaneService: where a decode node lets prefill nodes in.

A lane is opened only by a registered prefill node of the same protocol, layout and incarnation
of this node; what differs is named. A new lane of the same node replaces the old one: its epoch
is higher, its random lane_id is what the data plane must show. Runs on the event loop.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.blocks import BlockPool
from kvtransfer.grpc_plane import PLANE, PlaneError
from kvtransfer.inbox import Inbox, IncomingTransfer
from kvtransfer.incoming_lane import IncomingLane
from kvtransfer.layout import first_difference
from kvtransfer.memory import KvMemory
from kvtransfer.messages import NodeKey
from kvtransfer.receiver import LaneProtocolError
from kvtransfer.wire import (
    layout_from_pb,
    node_from_pb,
    receiver_message_to_pb,
    sender_message_from_pb,
)
from protos.errors import Reason, ServingError
from protos.pd.v1 import lane_pb2, lane_pb2_grpc
from protos.serving import PROTOCOL_VERSION, Context, next_message

log = logging.getLogger(__name__)

NUM_SLOTS = 4
HANDSHAKE_DEADLINE_S = 5.0
SLOT_TARGET_BYTES = 4 * 1024 * 1024


class LaneServicer(lane_pb2_grpc.LaneServiceServicer):
    """Owner of all incoming lanes. is_prefill_node tells whether a node is registered as one,
    after a short wait for a membership that is under way."""

    def __init__(
        self,
        *,
        me: NodeKey,
        inbox: Inbox,
        pool: BlockPool,
        memory: KvMemory,
        is_prefill_node: Callable[[NodeKey], Awaitable[bool]],
    ) -> None:
        self._me = me
        self._inbox = inbox
        self._pool = pool
        self._memory = memory
        self._is_prefill_node = is_prefill_node
        block_bytes = memory.layout.block_bytes
        self._slot_bytes = max(1, SLOT_TARGET_BYTES // block_bytes) * block_bytes
        self._lanes: dict[str, IncomingLane] = {}
        self._last_epoch = 0
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="lane")

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
        self._copier.shutdown(wait=True)

    async def Lane(
        self, requests: AsyncIterator[lane_pb2.LaneRequest], context: Context
    ) -> AsyncIterator[lane_pb2.LaneResponse]:
        hello = (await next_message(requests, timeout_s=HANDSHAKE_DEADLINE_S)).hello
        lane = await self._admit(hello)
        log.info("lane from %s open epoch=%d", lane.sender, lane.epoch)
        listening = asyncio.create_task(self._listen(lane, requests))
        try:
            yield self._welcome(lane)
            while (message := await lane.outbox.get()) is not None:
                yield receiver_message_to_pb(message)
            raise ServingError(Reason.LANE_LOST, str(lane.failure), node=self._me)
        finally:
            listening.cancel()
            await asyncio.wait([listening])
            lane.close(lane.failure or "lane lost")
            if self._lanes.get(lane.sender.node_id) is lane:
                del self._lanes[lane.sender.node_id]
            log.info("lane from %s ended epoch=%d", lane.sender, lane.epoch)

    async def Plane(
        self, requests: AsyncIterator[lane_pb2.PlaneRequest], context: Context
    ) -> lane_pb2.PlaneResponse:
        lane_id = (await next_message(requests, timeout_s=HANDSHAKE_DEADLINE_S)).lane_id
        lane = next((la for la in self._lanes.values() if la.lane_id == lane_id), None)
        if lane is None:
            raise ServingError(Reason.LANE_LOST, "no open lane has this id", node=self._me)
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
                async for request in requests:
                    message = sender_message_from_pb(request)
                    if message is None:
                        raise LaneProtocolError("a request that has no place here")
                    lane.handle(message)
                watchdog.cancel()
            lane.fail("the sender ended the stream")
        except* LaneProtocolError as errors:
            lane.fail(str(errors.exceptions[0]))
        finally:
            # Whatever it was: a lane that nobody listens to has ended.
            lane.fail("the sender is not heard any more")

    async def _admit(self, hello: lane_pb2.Hello) -> IncomingLane:
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
            difference = first_difference(self._memory.layout, layout_from_pb(hello.layout))
        except ValueError as error:
            difference = str(error)
        if difference is not None:
            raise ServingError(
                Reason.LAYOUT_MISMATCH,
                f"KV layouts differ in {difference}",
                field=difference.partition(":")[0],
            )
        if PLANE not in hello.planes:
            raise ServingError(Reason.PROTOCOL_MISMATCH, f"no common plane: this node has {PLANE}")
        previous = self._lanes.get(sender.node_id)
        if previous is not None:
            previous.close("replaced by a new lane")
        self._last_epoch += 1
        lane = IncomingLane(
            sender=sender,
            lane_id=secrets.token_bytes(16),
            epoch=self._last_epoch,
            inbox=self._inbox,
            pool=self._pool,
            memory=self._memory,
            num_slots=NUM_SLOTS,
            slot_bytes=self._slot_bytes,
            copier=self._copier,
        )
        self._lanes[sender.node_id] = lane
        return lane

    def _welcome(self, lane: IncomingLane) -> lane_pb2.LaneResponse:
        return lane_pb2.LaneResponse(
            welcome=lane_pb2.Welcome(
                lane_id=lane.lane_id,
                epoch=lane.epoch,
                plane=PLANE,
                num_slots=NUM_SLOTS,
                slot_bytes=self._slot_bytes,
            )
        )
