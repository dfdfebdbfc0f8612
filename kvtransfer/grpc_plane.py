"""The grpc data plane: chunk bytes as messages on a stream and a channel of their own.

Works everywhere, at the cost of two copies per side. Completion is counted in bytes; the digest
is computed piece by piece as they pass. Runs on the event loop.

    sender:   connect, send(seq, blocks), close
    receiver: post_receive(seq, slot), deliver(piece), close
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import xxhash

from protos.pd.v1 import lane_pb2, lane_pb2_grpc
from protos.serving import dial

PLANE = "grpc"
PIECE_BYTES = 256 * 1024


class GrpcPlaneSender:
    """One Plane call; chunks go out one after the other."""

    def __init__(self, address: str, *, lane_id: bytes) -> None:
        self._channel = dial(address, purpose="plane")
        self._call = lane_pb2_grpc.LaneServiceStub(self._channel).Plane()
        self._lane_id = lane_id

    async def connect(self) -> None:
        """Names the lane. Raises grpc.aio.AioRpcError."""
        await self._call.write(lane_pb2.PlaneRequest(lane_id=self._lane_id))

    async def send(self, seq: int, blocks: Iterable[memoryview]) -> int:
        """Writes the blocks, in order. Returns the chunk's XXH3-64."""
        digest = xxhash.xxh3_64()
        offset = 0
        for block in blocks:
            for start in range(0, len(block), PIECE_BYTES):
                piece = bytes(block[start : start + PIECE_BYTES])
                digest.update(piece)
                await self._call.write(lane_pb2.PlaneRequest(seq=seq, offset=offset, data=piece))
                offset += len(piece)
        return digest.intdigest()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


class PlaneError(Exception):
    """Bytes that were not expected; the lane cannot go on."""


@dataclass(slots=True)
class _Receive:
    slot: memoryview
    num_bytes: int = 0
    digest: "xxhash.xxh3_64" = field(default_factory=xxhash.xxh3_64)


class GrpcPlaneReceiver:
    """Posted receives of one lane. on_arrived(seq, digest) is called when a chunk is complete."""

    def __init__(self, *, on_arrived: Callable[[int, int], None]) -> None:
        self._receives: dict[int, _Receive] = {}
        self._on_arrived = on_arrived

    def post_receive(self, seq: int, slot: memoryview) -> None:
        """Chunk seq is to fill slot exactly."""
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
        receive.digest.update(piece.data)
        receive.num_bytes = end
        if end == len(receive.slot):
            del self._receives[piece.seq]
            self._on_arrived(piece.seq, receive.digest.intdigest())

    def close(self) -> None:
        self._receives.clear()
