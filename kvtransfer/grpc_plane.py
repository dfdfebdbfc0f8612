"""The grpc data plane: chunk bytes as messages on a stream and a channel of their own.

Works everywhere, at the cost of two copies per side. Completion is counted in bytes, so that
nothing has to be waited for. Runs on the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from kvtransfer.chunk_bytes import digest
from kvtransfer.plane import PlaneError, PlaneLink
from protos.pd.v1 import lane_pb2, lane_pb2_grpc
from protos.serving import dial

PIECE_BYTES = 256 * 1024


class GrpcPlaneSender:
    """One Plane call; chunks go out one after the other."""

    def __init__(self, link: PlaneLink) -> None:
        self._channel = dial(link.address, purpose="plane")
        self._call = lane_pb2_grpc.LaneServiceStub(self._channel).Plane()
        self._lane_id = link.lane_id

    async def connect(self) -> None:
        await self._call.write(lane_pb2.PlaneRequest(lane_id=self._lane_id))

    async def send(self, seq: int, blocks: Sequence[memoryview]) -> None:
        offset = 0
        try:
            for block in blocks:
                for start in range(0, len(block), PIECE_BYTES):
                    piece = bytes(block[start : start + PIECE_BYTES])
                    message = lane_pb2.PlaneRequest(seq=seq, offset=offset, data=piece)
                    await self._call.write(message)
                    offset += len(piece)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # A write to a call that has ended raises InvalidStateError.
            raise PlaneError(f"the data plane ended: {error}") from error

    def acknowledged(self, seq: int) -> None:
        """Its bytes were copied when they were sent."""

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


@dataclass(slots=True)
class _Receive:
    slot: memoryview
    num_bytes: int = 0


class GrpcPlaneReceiver:
    """Posted receives of one lane, filled by its Plane call."""

    def __init__(self, link: PlaneLink, *, on_arrived: Callable[[int], None]) -> None:
        self._thread = link.thread
        self._receives: dict[int, _Receive] = {}
        self._on_arrived = on_arrived

    async def connect(self) -> None:
        """The sender's call comes in by itself."""

    def post_receive(self, seq: int, slot: memoryview, *, num_blocks: int) -> None:
        self._receives[seq] = _Receive(slot)

    def deliver(self, piece: lane_pb2.PlaneRequest) -> None:
        """Takes one message of the Plane call. Raises PlaneError."""
        receive = self._receives.get(piece.seq)
        if receive is None or piece.offset != receive.num_bytes:
            raise PlaneError(f"bytes of seq {piece.seq} at {piece.offset} were not expected")
        end = piece.offset + len(piece.data)
        if end > len(receive.slot):
            raise PlaneError(f"seq {piece.seq} overruns its slot of {len(receive.slot)} bytes")
        receive.slot[piece.offset : end] = piece.data
        receive.num_bytes = end
        if end == len(receive.slot):
            del self._receives[piece.seq]
            self._on_arrived(piece.seq)

    def sent(self, seq: int) -> None:
        """Bytes are counted; nothing is learnt from this."""

    async def wait(self, seq: int, slot: memoryview) -> int:
        """A chunk arrives when it is complete; only its digest takes time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, digest, [slot])

    def close(self) -> None:
        self._receives.clear()
