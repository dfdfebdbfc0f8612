"""A lane as the prefill node holds it: the sender's state machine, its stream and its plane.

    begin / offer / commit / abort  -->  LaneSender  -->  control stream (queue -> Lane call)
                                             ^      -->  plane (queue -> send)
                                             +-- responses of the Lane call

Four tasks, one owner: whatever ends first (the stream, the plane, the watchdog, close()) ends
all, and every open transfer with them. Runs on the event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import grpc.aio

from kvtransfer.blocks import BlockPool, Lease, LeaseReleased
from kvtransfer.grpc_plane import PLANE, GrpcPlaneSender
from kvtransfer.layout import KvLayout
from kvtransfer.memory import KvMemory
from kvtransfer.messages import Commit, FirstToken, NodeKey, SenderMessage
from kvtransfer.receiver import LaneProtocolError
from kvtransfer.sender import Action, Done, LaneSender, OutgoingTransfer, Say, Ship
from kvtransfer.wire import (
    layout_to_pb,
    node_to_pb,
    receiver_message_from_pb,
    sender_message_to_pb,
)
from protos.errors import Reason, ServingError, invalid, read_error
from protos.pd.v1 import lane_pb2, lane_pb2_grpc
from protos.serving import PROTOCOL_VERSION, dial

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
# What a peer that is gone, or that breaks the protocol, makes of a lane. A write to a call that has
# ended raises InvalidStateError.
LANE_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, LaneProtocolError)


class OutgoingLane:
    """Open until closed is set. Made by open_lane; closed by whoever opened it."""

    def __init__(
        self,
        *,
        peer: NodeKey,
        epoch: int,
        pool: BlockPool,
        memory: KvMemory,
        state: LaneSender,
        outbox: "asyncio.Queue[SenderMessage]",
        responses: AsyncIterator[lane_pb2.LaneResponse],
        plane: GrpcPlaneSender,
        resources: AsyncExitStack,
    ) -> None:
        self.peer = peer
        self.epoch = epoch
        self.closed = asyncio.Event()
        self._pool = pool
        self._memory = memory
        self._outbox = outbox
        self._responses = responses
        self._plane = plane
        self._ships: asyncio.Queue[Ship] = asyncio.Queue()
        self._sender = state
        self._resources = resources
        self._main = asyncio.create_task(self._run(), name=f"lane to {peer}")

    def begin(
        self, transfer_id: bytes, *, lease: Lease, on_end: Callable[[str | None], None]
    ) -> OutgoingTransfer:
        """Opens a transfer of the lease's blocks; on_end as in OutgoingTransfer.

        Raises ServingError: LANE_LOST, INVALID_ARGUMENT for an id that is open already.
        """
        if self.closed.is_set():
            raise ServingError(Reason.LANE_LOST, f"lane to {self.peer} is down", node=self.peer)
        try:
            return self._sender.begin(transfer_id, lease=lease, on_end=on_end)
        except LaneProtocolError as error:
            raise invalid("target.transfer_id", str(error)) from error

    def offer(self, transfer: OutgoingTransfer, *, first_block: int, num_blocks: int) -> None:
        """Ships sealed blocks; they stay readable until the receiver has them."""
        if transfer.ended:
            return
        block_ids = transfer.lease.block_ids[first_block : first_block + num_blocks]
        try:
            self._pool.begin_read(transfer.lease, block_ids)
        except LeaseReleased:
            return
        self._act(self._sender.offer(transfer, first_block=first_block, num_blocks=num_blocks))

    def commit(
        self,
        transfer: OutgoingTransfer,
        *,
        num_blocks: int,
        first_tokens: tuple[FirstToken, ...],
    ) -> None:
        commit = Commit(
            transfer_id=transfer.transfer_id, num_blocks=num_blocks, first_tokens=first_tokens
        )
        self._act(self._sender.commit(transfer, commit))

    def abort(self, transfer: OutgoingTransfer, reason: str) -> None:
        """Ends the transfer. Nothing if it is over."""
        self._act(self._sender.abort(transfer, reason))

    async def close(self) -> None:
        self._main.cancel()
        await asyncio.wait([self._main])

    async def _run(self) -> None:
        reason = "lane closed"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._ship())
                tasks.create_task(self._watch())
        except* LANE_ERRORS as errors:
            reason = f"lane lost: {_first_line(errors.exceptions[0])}"
        finally:
            log.info("lane to %s ended epoch=%d reason=%r", self.peer, self.epoch, reason)
            self.closed.set()
            self._act(self._sender.close(reason))
            await self._resources.aclose()

    async def _receive(self) -> None:
        async for response in self._responses:
            message = receiver_message_from_pb(response)
            if message is None:
                raise LaneProtocolError("a response that has no place after the handshake")
            self._act(self._sender.handle(message))
        raise LaneProtocolError("the receiver ended the stream")

    async def _ship(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ship = await self._ships.get()
            with self._memory.reading(ship.chunk.block_ids) as blocks:
                digest = await self._plane.send(ship.seq, blocks)
            self._act(self._sender.shipped(ship.seq, digest=digest, now=loop.time()))

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._sender.overdue(loop.time()):
                raise LaneProtocolError("a chunk was not acknowledged in time")

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Say():
                    self._outbox.put_nowait(action.message)
                case Ship():
                    self._ships.put_nowait(action)
                case Done():
                    self._pool.end_read(action.chunk.block_ids)


async def open_lane(
    address: str,
    *,
    sender: NodeKey,
    receiver: NodeKey,
    pool: BlockPool,
    memory: KvMemory,
) -> OutgoingLane:
    """Dials a registered decode node and shakes hands. Raises ServingError (LAYOUT_MISMATCH,
    UNKNOWN_NODE, ...) with the receiver's reason. The caller sets the deadline."""
    outbox: asyncio.Queue[SenderMessage] = asyncio.Queue()

    async def requests() -> AsyncIterator[lane_pb2.LaneRequest]:
        yield lane_pb2.LaneRequest(hello=_hello(sender, receiver, memory.layout))
        while True:
            yield sender_message_to_pb(await outbox.get())

    async with AsyncExitStack() as opened:
        channel = dial(address, purpose="lane")
        opened.push_async_callback(channel.close)
        try:
            responses = aiter(lane_pb2_grpc.LaneServiceStub(channel).Lane(requests()))
            welcome = (await anext(responses)).welcome
            plane = GrpcPlaneSender(address, lane_id=welcome.lane_id)
            opened.push_async_callback(plane.close)
            await plane.connect()
            state = LaneSender(
                num_slots=welcome.num_slots,
                slot_bytes=welcome.slot_bytes,
                block_bytes=memory.layout.block_bytes,
            )
        except (*LANE_ERRORS, StopAsyncIteration) as error:
            ours = read_error(error) if isinstance(error, grpc.aio.AioRpcError) else None
            message = f"cannot open a lane to {receiver}: {_first_line(error)}"
            raise ours or ServingError(Reason.LANE_LOST, message, node=receiver) from error
        lane = OutgoingLane(
            peer=receiver,
            epoch=welcome.epoch,
            pool=pool,
            memory=memory,
            state=state,
            outbox=outbox,
            responses=responses,
            plane=plane,
            resources=opened.pop_all(),
        )
    log.info("lane to %s open epoch=%d plane=%s", receiver, welcome.epoch, welcome.plane)
    return lane


def _hello(sender: NodeKey, receiver: NodeKey, layout: KvLayout) -> lane_pb2.Hello:
    return lane_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        sender=node_to_pb(sender),
        receiver=node_to_pb(receiver),
        layout=layout_to_pb(layout),
        planes=[PLANE],
    )


def _first_line(error: BaseException) -> str:
    text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return (text or type(error).__name__).splitlines()[0]
