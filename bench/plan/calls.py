"""What the two node services do for one request, in simulated time.

    DecodeCall:  reserve or refuse -> reserved -> sealed by the lane, or local -> tokens -> release
    PrefillCall: a turn -> blocks -> chunks, each offered to the lane -> first token -> committed

As in decode_server/service.py and prefill_server/service.py: a call owns what it takes, until its
end. Whoever made it is told through its front's callbacks, after the time that a call takes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from bench.plan.clock import Clock
from bench.plan.lane import SimulatedLane
from bench.plan.nodes import SimulatedNode
from bench.plan.request import PlannedRequest
from coordinator.queue import Claim
from engine.room import NodeFull
from engine.scheduler import Progress, Running
from engine.sequence import GenerationSpec
from kvtransfer.blocks import BlocksExhausted, Lease
from kvtransfer.inbox import IncomingTransfer
from kvtransfer.messages import FirstToken


class Front(Protocol):
    """The coordinator's side of the calls; told at once, it counts the way to it."""

    def reserved(self, call: "DecodeCall", *, available_blocks: int, status_seq: int) -> None: ...

    def refused(self, request: PlannedRequest) -> None: ...

    def preempted(self, request: PlannedRequest) -> None: ...

    def sealed(self, request: PlannedRequest) -> None: ...

    def drew(self, request: PlannedRequest, times_s: Sequence[float]) -> None: ...

    def finished(self, request: PlannedRequest) -> None: ...

    def prefill_ended(self, claim: Claim) -> None: ...


class DecodeCall:
    """A request on its decode node. It is the job of its sequence there."""

    def __init__(
        self, clock: Clock, node: SimulatedNode, request: PlannedRequest, *, front: Front
    ) -> None:
        self.node = node
        self.request = request
        self.transfer: IncomingTransfer | None = None
        self._clock = clock
        self._front = front
        self._spec = request.spec()
        self._lease: Lease | None = None
        self._cleanup = ExitStack()
        self._computed: Callable[[int], None] = lambda num_tokens: None

    def start(self, *, is_local: bool) -> None:
        """Reserves and goes on, or refuses."""
        num_blocks = self.node.layout.blocks_for(len(self._spec.token_ids) + 1)
        try:
            self._lease = self.node.take(num_blocks, headroom=True)
        except (BlocksExhausted, NodeFull):
            self._front.refused(self.request)
            return
        if not is_local:
            self.transfer = self.node.inbox.expect(
                self._lease, num_tokens=len(self._spec.token_ids), on_end=self._received
            )
        status = self.node.status()
        self._front.reserved(self, available_blocks=status.available_blocks, status_seq=status.seq)
        if is_local:
            backlog = self.node.backlog.computing(len(self._spec.token_ids))
            self._computed = self._cleanup.enter_context(backlog)
            self._run(self._spec.token_ids, num_computed=0)

    def _received(self, reason: str | None) -> None:
        assert reason is None and self.transfer is not None
        first_tokens = self.transfer.first_tokens
        assert first_tokens is not None
        self._front.sealed(self.request)
        num_prompt_tokens = len(self._spec.token_ids)
        token_ids = (*self._spec.token_ids, first_tokens[0].token_id)
        # Not at once: this comes out of the middle of the lane's work.
        self._clock.after(0.0, lambda: self._run(token_ids, num_computed=num_prompt_tokens))

    def _run(self, token_ids: Sequence[int], *, num_computed: int) -> None:
        assert self._lease is not None
        _run(self.node, self, self._spec, self._lease, token_ids, num_computed=num_computed)

    def progressed(self, progress: Progress) -> None:
        self._computed(progress.num_computed)
        if progress.token_id is not None:
            self._front.drew(self.request, (self._clock.now_s,))
        if progress.left:
            self._close()
            self._front.finished(self.request)

    def drew(self, times_s: Sequence[float]) -> None:
        self._front.drew(self.request, times_s)

    def preempted(self) -> None:
        self._close()
        self._front.preempted(self.request)

    def _close(self) -> None:
        assert self._lease is not None
        self._cleanup.close()
        self.node.give_back(self._lease)


class PrefillTurns:
    """The requests of a prefill node, which get its blocks in their order of arrival."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node
        self._waiting: deque[PrefillCall] = deque()
        node.on_room = self._take_turns

    def join(self, call: "PrefillCall") -> None:
        self._waiting.append(call)
        self._node.num_queued += 1
        self._node.changed()
        self._take_turns()

    def _take_turns(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            try:
                lease = self._node.take(call.num_blocks)
            except (BlocksExhausted, NodeFull):
                return
            self._waiting.popleft()
            self._node.num_queued -= 1
            call.compute(lease)


class PrefillCall:
    """A request on its prefill node. transfer_id is None where one token is all there is."""

    def __init__(
        self,
        clock: Clock,
        node: SimulatedNode,
        request: PlannedRequest,
        *,
        claim: Claim,
        front: Front,
        lane: SimulatedLane | None,
        transfer_id: bytes | None,
    ) -> None:
        self._clock = clock
        self._node = node
        self.request = request
        self._front = front
        self._claim = claim
        self._lane = lane
        self._transfer_id = transfer_id
        self._spec = request.spec()
        self._num_tokens = len(self._spec.token_ids)
        self.num_blocks = node.layout.blocks_for(self._num_tokens + 1)
        self._lease: Lease | None = None
        self._num_offered = 0
        self._cleanup = ExitStack()
        self._computed: Callable[[int], None] = lambda num_tokens: None

    def start(self, turns: PrefillTurns) -> None:
        self._computed = self._cleanup.enter_context(self._node.backlog.computing(self._num_tokens))
        turns.join(self)

    def compute(self, lease: Lease) -> None:
        self._lease = lease
        if self._lane is not None:
            assert self._transfer_id is not None
            self._transfer = self._lane.begin(
                self._transfer_id,
                lease=lease,
                num_tokens=self._num_tokens,
                on_end=self._shipped,
            )
        _run(
            self._node,
            self,
            self._spec,
            lease,
            self._spec.token_ids,
            num_computed=0,
            max_new_tokens=1,
        )

    def progressed(self, progress: Progress) -> None:
        self._computed(progress.num_computed)
        self._offer(progress.num_computed)
        if progress.token_id is None:
            return
        self._front.drew(self.request, (self._clock.now_s,))
        if self._lane is None:
            self._end()
            self._front.finished(self.request)
        else:
            first = FirstToken(choice=0, position=self._num_tokens, token_id=progress.token_id)
            self._lane.commit(self._transfer, num_blocks=self._num_transferred, first_token=first)

    def drew(self, times_s: Sequence[float]) -> None:
        raise AssertionError("a prefill node draws one token, in a step of its own")

    def preempted(self) -> None:
        raise AssertionError("sequences of a prefill node do not grow")

    @property
    def _num_transferred(self) -> int:
        return self._node.layout.blocks_for(self._num_tokens)

    def _offer(self, num_computed: int) -> None:
        if self._lane is None:
            return
        is_all = num_computed >= self._num_tokens
        block_size = self._node.layout.block_size
        num_full = self._num_transferred if is_all else num_computed // block_size
        if num_full > self._num_offered:
            self._lane.offer(
                self._transfer,
                first_block=self._num_offered,
                num_blocks=num_full - self._num_offered,
            )
            self._num_offered = num_full

    def _shipped(self, reason: str | None) -> None:
        assert reason is None
        self._end()

    def _end(self) -> None:
        assert self._lease is not None
        self._cleanup.close()
        self._node.give_back(self._lease)
        self._front.prefill_ended(self._claim)


def _run(
    node: SimulatedNode,
    job: DecodeCall | PrefillCall,
    spec: GenerationSpec,
    lease: Lease,
    token_ids: Sequence[int],
    *,
    num_computed: int,
    max_new_tokens: int | None = None,
) -> None:
    sequence = Running(
        key=node.next_key(),
        spec=spec,
        block_table=list(lease.block_ids),
        token_ids=list(token_ids),
        num_computed=num_computed,
        max_new_tokens=max_new_tokens or spec.stop.max_tokens,
        arrived_s=job.request.arrived_s,
    )
    node.loop.add(sequence, lease, job)
