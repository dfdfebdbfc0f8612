"""Which data planes two ends have in common, and how one is made.

The sender names its planes in the order of its liking, the receiver takes the first that it has.
gloo is offered only to a loopback address: its sockets listen there and nowhere else. torch is
imported with the plane that needs it, so that emulated nodes do without.
"""

import ipaddress
from collections.abc import Callable, Sequence

from kvtransfer.grpc_plane import GrpcPlaneReceiver, GrpcPlaneSender
from kvtransfer.plane import GLOO, GRPC, PlaneLink, ReceivingPlane, SendingPlane


def planes_for(address: str, planes: Sequence[str]) -> list[str]:
    """Those of our planes that can reach address, best first."""
    return [plane for plane in planes if plane != GLOO or is_loopback(address)]


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
    raise ValueError(f"plane: {plane!r} is not known")


def receiving_plane(
    plane: str, link: PlaneLink, *, on_arrived: Callable[[int], None]
) -> ReceivingPlane:
    if plane == GRPC:
        return GrpcPlaneReceiver(on_arrived=on_arrived)
    if plane == GLOO:
        from kvtransfer.gloo_plane import GlooPlaneReceiver

        return GlooPlaneReceiver(link, on_arrived=on_arrived)
    raise ValueError(f"plane: {plane!r} is not known")
