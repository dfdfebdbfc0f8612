"""The lanes of a prefill node: one to each decode node, opened when membership tells of it, so that
no request pays for it, and rebuilt on demand after a loss.

A target is resolved in the membership; no address from a request is ever dialled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from kvtransfer.blocks import BlockPool
from kvtransfer.lane_metrics import LaneMetrics
from kvtransfer.memory import KvMemory
from kvtransfer.messages import NodeKey
from kvtransfer.outgoing_lane import OutgoingLane, open_lane
from kvtransfer.plane import NCCL
from protos.errors import Reason, ServingError

log = logging.getLogger(__name__)

OPEN_DEADLINE_S = 5.0


class LaneDialer:
    """Owner of all outgoing lanes, over planes in the order of liking.

    resolve gives the address of a registered decode node, or None after a short wait.
    """

    def __init__(
        self,
        *,
        me: NodeKey,
        pool: BlockPool,
        memory: KvMemory,
        resolve: Callable[[NodeKey], Awaitable[str | None]],
        planes: Sequence[str],
        metrics: LaneMetrics | None = None,
    ) -> None:
        self._me = me
        self._pool = pool
        self._memory = memory
        self._resolve = resolve
        self._planes = planes
        self._metrics = metrics or LaneMetrics(CollectorRegistry())
        self._lanes: dict[NodeKey, OutgoingLane] = {}
        self._opening: dict[NodeKey, asyncio.Lock] = {}
        self._openings: set[asyncio.Task[None]] = set()
        self._closings: set[asyncio.Task[None]] = set()
        # To whom NCCL did not connect, as two nodes on one GPU mostly do not.
        self._without_nccl: set[NodeKey] = set()
        self._is_closed = False

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
                        planes=self._planes_to(target),
                        metrics=self._metrics,
                        not_connected=lambda plane: self._not_connected(target, plane),
                    )
            except TimeoutError as error:
                raise ServingError(
                    Reason.LANE_LOST,
                    f"{target} did not answer the lane handshake in {OPEN_DEADLINE_S:g} s",
                    node=target,
                ) from error
            self._lanes[target] = lane
            return lane

    def keep(self, targets: set[NodeKey]) -> None:
        """Closes lanes to others, and opens those to targets in the background."""
        self._without_nccl &= targets
        for target in [key for key in self._lanes if key not in targets]:
            self._opening.pop(target, None)
            _start(self._lanes.pop(target).close(), self._closings)
        if self._is_closed:
            return
        for target in targets - self._lanes.keys() - self._opening.keys():
            _start(self._open(target), self._openings)

    async def close(self) -> None:
        """No call may ask for a lane any more."""
        self._is_closed = True
        for task in self._openings:
            task.cancel()
        if self._openings:
            await asyncio.wait(self._openings)
        self.keep(set())
        if self._closings:
            await asyncio.wait(self._closings)

    def _planes_to(self, target: NodeKey) -> Sequence[str]:
        if target not in self._without_nccl:
            return self._planes
        return [plane for plane in self._planes if plane != NCCL]

    def _not_connected(self, target: NodeKey, plane: str) -> None:
        """The next lane goes without NCCL, if there is another plane."""
        if plane == NCCL and set(self._planes) != {NCCL}:
            log.warning("nccl does not connect to %s: another plane from now on", target)
            self._without_nccl.add(target)

    async def _open(self, target: NodeKey) -> None:
        try:
            await self.lane_to(target)
        except ServingError as error:
            # The request that needs it tries again, and tells its coordinator.
            log.warning("no lane to %s yet: %s", target, error)


def _start(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
