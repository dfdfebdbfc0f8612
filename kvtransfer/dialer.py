"""The lanes of a prefill node: at most one to each decode node, opened on demand, rebuilt after a
loss. A target is resolved in the membership; no address from a request is ever dialled.
"""

import asyncio
from collections.abc import Awaitable, Callable

from kvtransfer.blocks import BlockPool
from kvtransfer.memory import KvMemory
from kvtransfer.messages import NodeKey
from kvtransfer.outgoing_lane import OutgoingLane, open_lane
from protos.errors import Reason, ServingError

OPEN_DEADLINE_S = 5.0


class LaneDialer:
    """Owner of all outgoing lanes. resolve gives the address of a registered decode node, or None
    after a short wait."""

    def __init__(
        self,
        *,
        me: NodeKey,
        pool: BlockPool,
        memory: KvMemory,
        resolve: Callable[[NodeKey], Awaitable[str | None]],
    ) -> None:
        self._me = me
        self._pool = pool
        self._memory = memory
        self._resolve = resolve
        self._lanes: dict[NodeKey, OutgoingLane] = {}
        self._opening: dict[NodeKey, asyncio.Lock] = {}

    async def lane_to(self, target: NodeKey) -> OutgoingLane:
        """The open lane to target. Raises ServingError (UNKNOWN_NODE, LANE_LOST, ...)."""
        async with self._opening.setdefault(target, asyncio.Lock()):
            lane = self._lanes.get(target)
            if lane is not None and not lane.closed.is_set():
                return lane
            address = await self._resolve(target)
            if address is None:
                self._opening.pop(target, None)
                raise ServingError(
                    Reason.UNKNOWN_NODE, f"{target} is not a registered decode node", node=target
                )
            try:
                async with asyncio.timeout(OPEN_DEADLINE_S):
                    lane = await open_lane(
                        address,
                        sender=self._me,
                        receiver=target,
                        pool=self._pool,
                        memory=self._memory,
                    )
            except TimeoutError as error:
                raise ServingError(
                    Reason.LANE_LOST,
                    f"{target} did not answer the lane handshake in {OPEN_DEADLINE_S:g} s",
                    node=target,
                ) from error
            self._lanes[target] = lane
            return lane

    async def forget(self, members: set[NodeKey]) -> None:
        """Closes lanes to nodes that are no members any more."""
        for target in [key for key in self._lanes if key not in members]:
            self._opening.pop(target, None)
            await self._lanes.pop(target).close()

    async def close(self) -> None:
        await self.forget(set())
