"""Which data planes two ends have in common, and what is made for the one that they use.

    device          planes, best first
    cpu             gloo, grpc       gloo to loopback only: its sockets listen there, nowhere else
    cuda            nccl, grpc       nccl between blocks of one layout: nothing translates on a GPU
    emulated        grpc

The sender names its planes in the order of its liking, the receiver takes the first that it has. A
CPU and a GPU node so meet in grpc. torch is imported with the plane that needs it, so that emulated
nodes do without.
"""

import ipaddress
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kvtransfer.chunk_bytes import digest, zero_tail
from kvtransfer.grpc_plane import GrpcPlaneReceiver, GrpcPlaneSender
from kvtransfer.layout import KvLayout
from kvtransfer.memory import KvMemory, host_slots
from kvtransfer.plane import GLOO, GRPC, NCCL, PlaneLink, ReceivingPlane, SendingPlane

SLOT_TARGET_BYTES = 4 * 1024 * 1024
# Larger, because that a chunk is complete is seen a millisecond late.
NCCL_SLOT_TARGET_BYTES = 16 * 1024 * 1024


def planes_on(device: str, *, has_nccl: bool) -> tuple[str, ...]:
    """What KV memory on a torch device can use, best first."""
    if device == "cpu":
        return (GLOO, GRPC)
    return (NCCL, GRPC) if has_nccl else (GRPC,)


def planes_for(address: str, planes: Sequence[str]) -> list[str]:
    """Those of our planes that can reach address, best first."""
    return [plane for plane in planes if plane != GLOO or is_loopback(address)]


def common_plane(
    theirs: Sequence[str], ours: Sequence[str], *, their_layout: KvLayout, our_layout: KvLayout
) -> str | None:
    """The first of theirs that we have and that can carry their blocks into ours."""
    for plane in theirs:
        if plane in ours and (plane != NCCL or their_layout == our_layout):
            return plane
    return None


def is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def sending_plane(plane: str, link: PlaneLink) -> SendingPlane:
    """Raises ValueError for a plane that there is none of."""
    if plane == GRPC:
        return GrpcPlaneSender(link)
    if plane == GLOO:
        from kvtransfer.gloo_plane import GlooPlaneSender

        return GlooPlaneSender(link)
    if plane == NCCL:
        from kvtransfer.nccl_plane import NcclPlaneSender

        return NcclPlaneSender(link)
    raise ValueError(f"plane: {plane!r} is not known")


def receiving_plane(
    plane: str, link: PlaneLink, *, on_arrived: Callable[[int], None]
) -> ReceivingPlane:
    if plane == GRPC:
        return GrpcPlaneReceiver(link, on_arrived=on_arrived)
    if plane == GLOO:
        from kvtransfer.gloo_plane import GlooPlaneReceiver

        return GlooPlaneReceiver(link, on_arrived=on_arrived)
    if plane == NCCL:
        from kvtransfer.nccl_plane import NcclPlaneReceiver

        return NcclPlaneReceiver(link, on_arrived=on_arrived)
    raise ValueError(f"plane: {plane!r} is not known")


def read_chunk(
    plane: str,
    memory: KvMemory,
    block_ids: Sequence[int],
    *,
    num_tokens_in_last: int,
    reading: ExitStack,
) -> tuple[Any, int | None]:
    """A chunk's bytes, as plane sends them, and their digest, or None if plane has none.

    Zeros are behind the last token. They are there while reading is open. On the lane's thread.
    """
    if plane == NCCL:
        from kvtransfer.device_memory import DeviceMemory

        assert isinstance(memory, DeviceMemory)
        return memory.pack(block_ids, num_tokens_in_last=num_tokens_in_last), None
    blocks = reading.enter_context(memory.reading(block_ids))
    if num_tokens_in_last < memory.layout.block_size:
        blocks[-1] = zero_tail(blocks[-1], memory.layout, num_tokens_in_block=num_tokens_in_last)
    return blocks, digest(blocks)


def slot_bytes(plane: str, theirs: KvLayout) -> int:
    """Of a slot of the receiver's staging ring: whole blocks, one at least."""
    target = NCCL_SLOT_TARGET_BYTES if plane == NCCL else SLOT_TARGET_BYTES
    return max(1, target // theirs.block_bytes) * theirs.block_bytes


def staging_slots(plane: str, memory: KvMemory, num_slots: int, *, slot_bytes: int) -> list[Any]:
    """The ring: what plane fills and memory.write takes, which can be sliced by bytes."""
    if plane == NCCL:
        from kvtransfer.device_memory import DeviceMemory

        assert isinstance(memory, DeviceMemory)
        return list(memory.new_slots(num_slots, slot_bytes=slot_bytes))
    return list(host_slots(num_slots, slot_bytes=slot_bytes))
