"""A node's Register stream over a real connection: its cache is told of, resynced and cleared."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from test_cache_feed import cache, hashes

from engine.membership import Membership
from kvtransfer.blocks import BlockPool
from protos.pd.v1 import cluster_pb2, cluster_pb2_grpc
from protos.serving import GrpcServer


class Coordinator(cluster_pb2_grpc.ClusterServiceServicer):
    """Keeps what a node tells; says what the test wants; ends the stream at None."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.say: asyncio.Queue[Any] = asyncio.Queue()

    async def Register(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        listening = asyncio.create_task(self._listen(requests))
        try:
            while (response := await self.say.get()) is not None:
                yield cluster_pb2.RegisterResponse(**response)
        finally:
            listening.cancel()

    async def next(self, kind: str) -> Any:
        """The next message of this kind, passing over others."""
        async with asyncio.timeout(10):
            while True:
                request = await self.heard.get()
                if request.WhichOneof("event") == kind:
                    return getattr(request, kind)

    async def _listen(self, requests: Any) -> None:
        async for request in requests:
            self.heard.put_nowait(request)


@asynccontextmanager
async def registered(pool: BlockPool) -> AsyncIterator[tuple[Coordinator, Membership]]:
    coordinator, server = Coordinator(), GrpcServer()
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(coordinator, server.server)
    address = await server.start("127.0.0.1:0")
    membership = Membership(
        registration=cluster_pb2.Registration(address="a"),
        status=cluster_pb2.NodeStatus,
        pool=pool,
        on_change=lambda _: None,
        on_drain=lambda: None,
    )
    running = asyncio.create_task(membership.run([address]))
    try:
        yield coordinator, membership
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(grace_s=0)


async def test_the_cache_is_told_of_before_the_first_status_and_then_as_it_changes():
    pool = BlockPool(4)
    cache(pool, hashes(1, 3))
    async with registered(pool) as (coordinator, membership):
        kinds = [(await coordinator.heard.get()).WhichOneof("event") for _ in range(3)]
        assert kinds == ["registration", "cache", "status"]
        cache(pool, hashes(1, 4))
        membership.status_changed()
        change = await coordinator.next("cache")
        assert (change.seq, change.is_snapshot, list(change.added)) == (2, False, [3])
        await coordinator.next("status")


async def test_a_resync_tells_everything_again():
    pool = BlockPool(4)
    async with registered(pool) as (coordinator, _):
        assert (await coordinator.next("cache")).is_snapshot
        cache(pool, hashes(1, 3))
        coordinator.say.put_nowait({"resync_cache": cluster_pb2.ResyncCache()})
        whole = await coordinator.next("cache")
        while not whole.is_snapshot:  # what was on its way
            whole = await coordinator.next("cache")
        assert sorted(whole.added) == [1, 2]


async def test_a_stream_that_begins_anew_tells_everything():
    pool = BlockPool(4)
    async with registered(pool) as (coordinator, _):
        await coordinator.next("cache")
        cache(pool, hashes(1, 3))
        coordinator.say.put_nowait(None)
        await coordinator.next("registration")
        whole = await coordinator.next("cache")
        assert (whole.seq, whole.is_snapshot, sorted(whole.added)) == (0, True, [1, 2])


async def test_a_cache_that_is_cleared_is_empty_and_told_of_at_once():
    pool = BlockPool(4)
    cache(pool, hashes(1, 3))
    async with registered(pool) as (coordinator, _):
        await coordinator.next("cache")
        coordinator.say.put_nowait({"clear_cache": cluster_pb2.ClearCache()})
        left = await coordinator.next("cache")
        assert (left.seq, left.is_snapshot, list(left.added)) == (2, True, [])
        assert pool.counts().free == 4
