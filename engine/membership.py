"""A node among others: registered with every coordinator, and told who else is there.

    cache, status --> Register stream (on change, at least every 500 ms) --> coordinator
    members, drain, clear the cache <-- Register stream <-- coordinator

One task per coordinator, reconnecting for as long as the node lives. Runs on the event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio

from engine.cache_feed import CacheFeed
from kvtransfer.blocks import BlockPool
from kvtransfer.messages import NodeKey
from kvtransfer.wire import node_from_pb
from protos.pd.v1 import cluster_pb2, cluster_pb2_grpc
from protos.serving import dial

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
# Changes closer together than this travel in one status.
COALESCE_S = 0.005
RECONNECT_S = 0.5
# How long to wait for a membership that may be under way.
LOOKUP_WAIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A registered node as others see it."""

    key: NodeKey
    role: cluster_pb2.NodeRole
    address: str


class Membership:
    """Registration of this node, and the members that its coordinators told of.

    status makes the current NodeStatus; pool is whose cache is told of, and cleared; on_change is
    called with all members when they changed, on_drain when a coordinator wants this node to stop.
    """

    def __init__(
        self,
        *,
        registration: cluster_pb2.Registration,
        status: Callable[[], cluster_pb2.NodeStatus],
        pool: BlockPool,
        on_change: Callable[[set[NodeKey]], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._registration = registration
        self._status = status
        self._pool = pool
        self._on_change = on_change
        self._on_drain = on_drain
        self._changed: dict[str, asyncio.Event] = {}
        self._members: dict[str, dict[NodeKey, Member]] = {}
        self._news = asyncio.Condition()

    async def run(self, coordinators: list[str]) -> None:
        """Stays registered with these addresses until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address in coordinators:
                self._changed[address] = asyncio.Event()
                tasks.create_task(self._stay_registered(address))

    def status_changed(self) -> None:
        """Makes a new status go out soon."""
        for event in self._changed.values():
            event.set()

    async def find(self, key: NodeKey, *, role: cluster_pb2.NodeRole) -> Member | None:
        """The member, waiting a little for a membership that is under way."""
        async with self._news:
            try:
                async with asyncio.timeout(LOOKUP_WAIT_S):
                    await self._news.wait_for(lambda: self._lookup(key) is not None)
            except TimeoutError:
                return None
        member = self._lookup(key)
        return member if member is not None and member.role == role else None

    def of_role(self, role: cluster_pb2.NodeRole) -> set[NodeKey]:
        """All members of this role."""
        return {
            member.key
            for members in self._members.values()
            for member in members.values()
            if member.role == role
        }

    def _lookup(self, key: NodeKey) -> Member | None:
        for members in self._members.values():
            if key in members:
                return members[key]
        return None

    async def _stay_registered(self, address: str) -> None:
        while True:
            try:
                async with dial(address, purpose="cluster") as channel:
                    stub = cluster_pb2_grpc.ClusterServiceStub(channel)
                    cache = CacheFeed(self._pool)
                    async for response in stub.Register(self._reports(address, cache)):
                        await self._heard(address, response, cache)
                reason = "stream ended"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            # Members stay known until a coordinator tells of others: lanes outlive its absence.
            log.warning("not registered coordinator=%s reason=%r", address, reason)
            await asyncio.sleep(RECONNECT_S)

    async def _heard(
        self, address: str, response: cluster_pb2.RegisterResponse, cache: CacheFeed
    ) -> None:
        match response.WhichOneof("event"):
            case "membership":
                await self._learn(address, response.membership)
            case "drain":
                self._on_drain()
            case "clear_cache":
                self._pool.clear_cache()
                log.info("cache cleared coordinator=%s", address)
                # The snapshot is the answer to this coordinator; others hear what has changed.
                cache.restart()
                self.status_changed()
            case "resync_cache":
                cache.restart()
                self._changed[address].set()

    async def _reports(
        self, address: str, cache: CacheFeed
    ) -> AsyncIterator[cluster_pb2.RegisterRequest]:
        changed = self._changed[address]
        yield cluster_pb2.RegisterRequest(registration=self._registration)
        while True:
            changed.clear()
            for events in cache.messages():
                yield cluster_pb2.RegisterRequest(cache=events)
            yield cluster_pb2.RegisterRequest(status=self._status())
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await changed.wait()
                    await asyncio.sleep(COALESCE_S)
            except TimeoutError:
                pass

    async def _learn(self, address: str, membership: cluster_pb2.Membership) -> None:
        members = (
            Member(key=node_from_pb(member.node), role=member.role, address=member.address)
            for member in membership.members
        )
        self._members[address] = {member.key: member for member in members}
        self._on_change({key for known in self._members.values() for key in known})
        async with self._news:
            self._news.notify_all()
