"""A lane as the prefill node holds it: the sender's state machine, its stream and its plane.

    begin / offer / commit / abort  -->  LaneSender  -->  control stream (queue -> Lane call)
                                             ^      -->  lane thread: digest -> plane
                                             +-- responses of the Lane call

Four tasks, one owner: whatever ends first (the stream, the plane, the watchdog, close()) ends
all, and every open transfer with them. Blocks are let go when the plane does not read them any
more. Runs on the event loop; bytes are read on the lane's thread.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import grpc.aio

from kvtransfer.blocks import BlockPool, Lease, LeaseReleased
from kvtransfer.lane_metrics import LaneMetrics
from kvtransfer.memory import KvMemory
from kvtransfer.messages import Ack, Commit, FirstToken, Nack, NodeKey, Ready
from kvtransfer.plane import PlaneError, PlaneLink, SendingPlane
from kvtransfer.planes import planes_for, read_chunk, sending_plane
from kvtransfer.receiver import LaneProtocolError
from kvtransfer.sender import Action, Chunk, Done, LaneSender, OutgoingTransfer, Say, Ship
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
LANE_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, LaneProtocolError, PlaneError)


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
        outbox: "asyncio.Queue[lane_pb2.LaneRequest]",
        responses: AsyncIterator[lane_pb2.LaneResponse],
        plane: SendingPlane,
        thread: ThreadPoolExecutor,
        plane_name: str,
        metrics: LaneMetrics,
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
        self._thread = thread
        self._ships: asyncio.Queue[Ship] = asyncio.Queue()
        self._sender = state
        self._plane_name = plane_name
        self._metrics = metrics
        # When each chunk was announced, and its size.
        self._announced: dict[int, tuple[float, int]] = {}
        self._resources = resources
        metrics.lane_opened(plane=plane_name, epoch=epoch)
        self._main = asyncio.create_task(self._run(), name=f"lane to {peer}")

    def begin(
        self,
        transfer_id: bytes,
        *,
        lease: Lease,
        num_tokens: int,
        on_end: Callable[[str | None], None],
    ) -> OutgoingTransfer:
        """Opens a transfer of num_tokens in the lease's blocks; on_end as in OutgoingTransfer.

        Raises ServingError: LANE_LOST, INVALID_ARGUMENT for an id that is open already.
        """
        if self.closed.is_set():
            raise ServingError(Reason.LANE_LOST, f"lane to {self.peer} is down", node=self.peer)

        def ended(reason: str | None) -> None:
            self._metrics.transfer_ended(reason=reason)
            on_end(reason)

        try:
            return self._sender.begin(transfer_id, lease=lease, num_tokens=num_tokens, on_end=ended)
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
            self._metrics.lane_ended(reason=reason)
            log.info("lane to %s ended epoch=%d reason=%r", self.peer, self.epoch, reason)
            self.closed.set()
            left = self._sender.close(reason)
            await self._resources.aclose()
            self._act(left)

    async def _receive(self) -> None:
        async for response in self._responses:
            message = receiver_message_from_pb(response)
            if message is None:
                raise LaneProtocolError("a response that has no place after the handshake")
            if isinstance(message, (Ack, Nack)):
                self._plane.acknowledged(message.seq)
                self._count(message)
            self._act(self._sender.handle(message))
        raise LaneProtocolError("the receiver ended the stream")

    def _count(self, answer: Ack | Nack) -> None:
        announced = self._announced.pop(answer.seq, None)
        if announced is not None and isinstance(answer, Ack):
            started, size_bytes = announced
            seconds = time.monotonic() - started
            self._metrics.chunk_sent(plane=self._plane_name, size_bytes=size_bytes, seconds=seconds)

    async def _ship(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ship = await self._ships.get()
            with ExitStack() as reading:
                blocks, checksum = await loop.run_in_executor(
                    self._thread, self._read, ship.chunk, reading
                )
                await self._plane.send(ship.seq, blocks)
            self._act(self._sender.shipped(ship.seq, digest=checksum))

    def _read(self, chunk: Chunk, reading: ExitStack) -> tuple[Any, int | None]:
        """The chunk's bytes while reading is open, without what is behind the last token."""
        size = self._memory.layout.block_size
        last = chunk.first_block + chunk.num_blocks - 1
        return read_chunk(
            self._plane_name,
            self._memory,
            chunk.block_ids,
            num_tokens_in_last=min(chunk.transfer.num_tokens - last * size, size),
            reading=reading,
        )

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
                    if isinstance(action.message, Ready):
                        ready = action.message
                        self._announced[ready.seq] = (time.monotonic(), ready.size_bytes)
                    self._outbox.put_nowait(sender_message_to_pb(action.message))
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
    planes: Sequence[str],
    metrics: LaneMetrics,
    not_connected: Callable[[str], None] = lambda plane: None,
) -> OutgoingLane:
    """Dials a registered decode node, shakes hands and connects the best of planes that both have.

    Raises ServingError (LAYOUT_MISMATCH, UNKNOWN_NODE, ...) with the receiver's reason. The caller
    sets the deadline, and is told by not_connected which plane did not come up.
    """
    hello = lane_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        sender=node_to_pb(sender),
        receiver=node_to_pb(receiver),
        layout=layout_to_pb(memory.layout),
        planes=planes_for(address, planes),
    )
    outbox: asyncio.Queue[lane_pb2.LaneRequest] = asyncio.Queue()
    outbox.put_nowait(lane_pb2.LaneRequest(hello=hello))

    async def requests() -> AsyncIterator[lane_pb2.LaneRequest]:
        while True:
            yield await outbox.get()

    async with AsyncExitStack() as opened:
        channel = dial(address, purpose="lane")
        opened.push_async_callback(channel.close)
        thread = ThreadPoolExecutor(1, thread_name_prefix="lane")
        opened.callback(thread.shutdown, wait=False)
        try:
            responses = aiter(lane_pb2_grpc.LaneServiceStub(channel).Lane(requests()))
            welcome = (await anext(responses)).welcome
            link = PlaneLink(
                address=address,
                lane_id=welcome.lane_id,
                thread=thread,
                memory=memory,
                say=lambda message: outbox.put_nowait(lane_pb2.LaneRequest(rendezvous=message)),
                hear=lambda: _rendezvous(responses),
            )
            plane = sending_plane(welcome.plane, link)
            opened.push_async_callback(plane.close)
            try:
                await plane.connect()
            except BaseException:  # also the caller's deadline
                not_connected(welcome.plane)
                raise
            state = LaneSender(
                num_slots=welcome.num_slots,
                slot_bytes=welcome.slot_bytes,
                block_bytes=memory.layout.block_bytes,
            )
        except (*LANE_ERRORS, StopAsyncIteration, ValueError) as error:
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
            thread=thread,
            plane_name=welcome.plane,
            metrics=metrics,
            resources=opened.pop_all(),
        )
    log.info("lane to %s open epoch=%d plane=%s", receiver, welcome.epoch, welcome.plane)
    return lane


async def _rendezvous(responses: AsyncIterator[lane_pb2.LaneResponse]) -> lane_pb2.Rendezvous:
    response = await anext(responses)
    if response.WhichOneof("event") != "rendezvous":
        raise LaneProtocolError("no rendezvous where one was due")
    return response.rendezvous


def _first_line(error: BaseException) -> str:
    text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return (text or type(error).__name__).splitlines()[0]
