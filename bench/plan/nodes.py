"""A planned node: real pool, room, claims, backlog and scheduler, and the statuses it sends.

    prefill call --> room in turn --> step loop --> lane      decode call --> room --> step loop

Statuses go to the coordinator as a live node's do: a little after a change, and every so often.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bench.plan.clock import Clock, Event
from bench.plan.cluster_model import ClusterModel, NodeModel
from bench.plan.lane import LaneEnd, Link
from bench.plan.step_loop import StepLoop
from coordinator.registry import NodeLoad
from engine.backlog import Backlog
from engine.claims import Claims
from engine.membership import COALESCE_S, HEARTBEAT_S
from engine.room import Room
from kvtransfer.blocks import BlockPool, Lease
from kvtransfer.inbox import Inbox
from kvtransfer.layout import KvLayout
from kvtransfer.messages import NodeKey


class BytelessMemory:
    """Implements KvMemory for claims that nobody computes over."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[list[memoryview]]:
        raise AssertionError("planned blocks hold no bytes")

    def write(self, block_ids: Sequence[int], data: memoryview) -> None:
        raise AssertionError("planned blocks hold no bytes")


class SimulatedNode:
    """One node of either role. on_status is told each status when the coordinator gets it."""

    def __init__(
        self,
        clock: Clock,
        *,
        rank: int,
        name: str,
        cluster: ClusterModel,
        model: NodeModel,
        on_status: Callable[[NodeLoad], None],
        may_leap: bool,
    ) -> None:
        layout = cluster.layout
        self.key = NodeKey(node_id=name, incarnation=1)
        self.model = model
        self.layout = layout
        self.pool = BlockPool(model.num_blocks, on_free=self._blocks_came_free)
        self.room = Room(self.pool, max_running=model.max_running)
        self.inbox = Inbox()
        self.backlog = Backlog(on_change=self.changed)
        self.num_queued = 0
        # Called when room may have come free.
        self.on_room: Callable[[], None] = lambda: None
        bytes_per_s = cluster.bandwidth_gbs * 1e9
        self.source = LaneEnd(key=self.key, pool=self.pool, link=Link(bytes_per_s))
        self.target = LaneEnd(key=self.key, pool=self.pool, link=Link(bytes_per_s))
        self.loop = StepLoop(
            clock,
            rank=rank,
            profile=model.profile,
            step_budget_ms=model.step_budget_ms,
            block_size=layout.block_size,
            pool=self.pool,
            claims=Claims(self.pool, BytelessMemory(layout, model.num_blocks)),
            step_overhead_ms=cluster.overheads.step_ms,
            may_leap=may_leap,
        )
        self._clock = clock
        self._status_s = cluster.overheads.status_ms / 1e3
        self._on_status = on_status
        self._status_seq = 0
        self._next_status: Event = clock.at(0.0, self._tell)
        self._told_s = 0.0
        self._is_news = True
        self._next_key = 0

    def next_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def take(self, num_blocks: int, *, headroom: bool = False) -> Lease:
        """Raises NodeFull, BlocksExhausted."""
        self.loop.touch()
        lease = self.room.take(num_blocks, headroom=headroom)
        self.changed()
        return lease

    def give_back(self, lease: Lease) -> None:
        self.loop.touch()
        self.room.give_back(lease)
        self._room_came_free()

    def changed(self) -> None:
        """A status goes out soon."""
        if not self._is_news:
            self._is_news = True
            self._next_status.cancel()
            soon_s = min(self._clock.now_s + COALESCE_S, self._told_s + HEARTBEAT_S)
            self._next_status = self._clock.at(soon_s, self._tell)

    def status(self) -> NodeLoad:
        self.loop.catch_up()
        self._status_seq += 1
        return NodeLoad(
            seq=self._status_seq,
            available_blocks=self.pool.counts().available,
            num_running=self.room.num_running,
            num_queued=self.num_queued,
            queued_tokens=self.backlog.num_tokens,
            num_decoding=self.loop.num_decoding,
            decode_context=self.loop.decode_context,
        )

    def _tell(self) -> None:
        self._is_news = False
        self._told_s = self._clock.now_s
        self._next_status = self._clock.after(HEARTBEAT_S, self._tell)
        status = self.status()
        self._clock.after(self._status_s, lambda: self._on_status(status))

    def _blocks_came_free(self) -> None:
        self._room_came_free()
        self.loop.wake()

    def _room_came_free(self) -> None:
        self.changed()
        if self.num_queued:
            # Not at once: whoever lets go is in the middle of it.
            self._clock.after(0.0, self.on_room)
