"""How a chunk's bytes get across: what a data plane is, whichever it is.

    sender:    connect, send(seq, blocks), close      awaited one after the other, in seq order
    receiver:  connect, post_receive(seq, slot), sent(seq) --on_arrived(seq)--> wait(seq), close

The lane's stream orders everything; a plane only moves bytes. grpc_plane.py works everywhere,
gloo_plane.py between CPU nodes of one host, nccl_plane.py between GPUs. A lane has one thread,
which its plane may use. Blocks to send and slots to fill are memoryviews, with nccl tensors on the
device: kvtransfer/planes.py makes them, and nobody but the plane and KvMemory looks inside.
"""

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from kvtransfer.memory import KvMemory
from protos.pd.v1 import lane_pb2

GRPC, GLOO, NCCL = "grpc", "gloo", "nccl"
PLANES = (GRPC, GLOO, NCCL)
# A chunk whose receive is posted and whose sender has begun takes no longer than this.
PLANE_DEADLINE_S = 2.0


class PlaneError(Exception):
    """The bytes cannot arrive, or are not what was expected; the lane cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLink:
    """What a plane gets from its lane: who it is, a thread, and the way to its other end.

    say and hear carry the rendezvous over the lane's stream (lane_store.py). memory is where the
    blocks are.
    """

    address: str
    lane_id: bytes
    thread: Executor
    memory: KvMemory
    say: Callable[[lane_pb2.Rendezvous], None]
    hear: Callable[[], Awaitable[lane_pb2.Rendezvous]]


class SendingPlane(Protocol):
    async def connect(self) -> None:
        """Raises PlaneError, grpc.aio.AioRpcError. The caller has the deadline."""
        ...

    async def send(self, seq: int, blocks: Any) -> None:
        """Begins to send; blocks are read until seq is acknowledged. Raises PlaneError."""
        ...

    def acknowledged(self, seq: int) -> None:
        """The receiver has all of chunk seq."""
        ...

    async def close(self) -> None:
        """Returns when no block is read any more."""
        ...


class ReceivingPlane(Protocol):
    """Made with on_arrived(seq), to be called on the loop when wait(seq) may be called."""

    async def connect(self) -> None: ...

    def post_receive(self, seq: int, slot: Any, *, num_blocks: int) -> None:
        """Chunk seq, of so many blocks, is to fill slot exactly. In the order of seq."""
        ...

    def sent(self, seq: int) -> None:
        """The sender has sent all of chunk seq."""
        ...

    async def wait(self, seq: int, slot: Any) -> int | None:
        """Returns when the slot of chunk seq is filled, with the digest of its bytes, or None on
        a plane whose bytes are not checked. Raises PlaneError."""
        ...

    def close(self) -> None:
        """Slots are not written any more once the plane's thread has come to its end."""
        ...
