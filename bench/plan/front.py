"""The coordinator in simulated time: the real line, pairing, registry and claims.

    arrive -> admit -> line -> pair -> decode call -> reserved -> prefill call -> ... -> finished
                        ^-- refused by the decode node, or preempted: its old place, longer

As coordinator/request.py and attempt.py do it, for requests whose nodes are never lost. A request
that waits in line past its deadline has failed; one that is being served then goes on.
"""

from collections.abc import Callable, Sequence

from bench.plan.calls import DecodeCall, PrefillCall, PrefillTurns
from bench.plan.clock import Clock
from bench.plan.cluster_model import ClusterModel
from bench.plan.lane import SimulatedLane
from bench.plan.nodes import SimulatedNode
from bench.plan.request import PlannedRequest
from coordinator.pairing import Pair
from coordinator.queue import Claim
from coordinator.registry import NodeEntry, NodeLoad, Registry
from coordinator.waiting_line import WaitingLine
from protos.errors import ServingError


class SimulatedFront:
    """Owner of all nodes. num_ended counts requests, num_refused_by_nodes reservations."""

    def __init__(
        self,
        clock: Clock,
        cluster: ClusterModel,
        *,
        on_end: Callable[[PlannedRequest], None],
        may_leap: bool,
    ) -> None:
        self.num_ended = 0
        self.num_refused_by_nodes = 0
        self.nodes: dict[str, SimulatedNode] = {}
        self._clock = clock
        self._cluster = cluster
        self._on_end = on_end
        self._call_s = cluster.overheads.call_ms / 1e3
        self._registry = Registry()
        self._turns: dict[str, PrefillTurns] = {}
        self._lanes: dict[tuple[str, str], SimulatedLane] = {}
        for index in range(cluster.num_nodes):
            self._add_node(index, may_leap=may_leap)
        self._line: WaitingLine[PlannedRequest] = WaitingLine(
            lambda: list(self._registry.nodes.values()), may_be_local=cluster.may_be_local
        )
        self._registry.listen(self._pair_next)

    @property
    def is_idle(self) -> bool:
        return not any(node.room.num_running for node in self.nodes.values())

    def arrive(self, request: PlannedRequest) -> None:
        """Its first moment in the coordinator."""
        now_s = self._clock.now_s
        request.arrived_s = now_s
        request.place = self._line.place(request.need)
        try:
            self._line.admit(request.place, request.need, remaining_s=self._cluster.timeout_s)
        except ServingError as error:
            self._end(request, outcome="refused", error=error.reason.name)
            return
        self._clock.after(self._cluster.timeout_s, lambda: self._expire(request))
        self._join(request)

    # What nodes tell, and when it gets here.

    def reserved(self, call: DecodeCall, *, available_blocks: int, status_seq: int) -> None:
        self._later(lambda: self._reserved(call, available_blocks, status_seq))

    def refused(self, request: PlannedRequest) -> None:
        self.num_refused_by_nodes += 1
        self._later(lambda: self._refused(request))

    def preempted(self, request: PlannedRequest) -> None:
        self._later(lambda: self._preempted(request))

    def sealed(self, request: PlannedRequest) -> None:
        request.sealed_s = request.sealed_s or self._clock.now_s + self._call_s

    def drew(self, request: PlannedRequest, times_s: Sequence[float]) -> None:
        for time_s in times_s:
            request.take_token(time_s + self._call_s)

    def finished(self, request: PlannedRequest) -> None:
        self._later(lambda: self._finished(request))

    def prefill_ended(self, claim: Claim) -> None:
        self._later(lambda: claim.let_go(prefill=True))

    def _later(self, callback: Callable[[], None]) -> None:
        self._clock.after(self._call_s, callback)

    def _add_node(self, index: int, *, may_leap: bool) -> None:
        cluster = self._cluster
        is_prefill = index < cluster.num_prefill
        model = cluster.prefill if is_prefill else cluster.decode
        name = f"prefill-{index}" if is_prefill else f"decode-{index - cluster.num_prefill}"
        node = SimulatedNode(
            self._clock,
            rank=index,
            name=name,
            cluster=cluster,
            model=model,
            on_status=lambda status: self._take_status(entry, status),
            may_leap=may_leap,
        )
        entry = NodeEntry(
            key=node.key,
            is_prefill=is_prefill,
            address=name,
            layout=cluster.layout,
            num_blocks=model.num_blocks,
            max_model_len=model.max_model_len,
            max_running=model.max_running,
            step_budget_ms=model.step_budget_ms,
            is_serving=True,
            available_blocks=model.num_blocks,
            profile=model.profile,
        )
        self.nodes[name] = node
        self._registry.register(entry)
        if is_prefill:
            self._turns[name] = PrefillTurns(node)

    def _join(self, request: PlannedRequest) -> None:
        assert request.place is not None
        self._line.add(request.place, request.need, request)
        self._pair_next()

    def _pair_next(self) -> None:
        while (first := self._line.first()) is not None:
            _, need, request = first
            try:
                pair = self._line.pair_first()
            except ServingError as error:
                self._end(request, outcome="refused", error=error.reason.name)
                continue
            if pair is None:
                return
            request.claim = Claim(pair, need, self._registry)
            self._attempt(request, pair)

    def _attempt(self, request: PlannedRequest, pair: Pair) -> None:
        request.pair = pair
        request.paired_s = request.paired_s or self._clock.now_s
        if pair.decode is None:
            self._prefill(request, None)
            return
        call = DecodeCall(self._clock, self.nodes[pair.decode.key.node_id], request, front=self)
        self._later(lambda: call.start(is_local=pair.prefill is None))

    def _prefill(self, request: PlannedRequest, decode: DecodeCall | None) -> None:
        assert request.pair is not None and request.pair.prefill is not None
        name = request.pair.prefill.key.node_id
        node = self.nodes[name]
        transfer = None if decode is None else decode.transfer
        assert request.claim is not None
        call = PrefillCall(
            self._clock,
            node,
            request,
            claim=request.claim,
            front=self,
            lane=None if decode is None else self._lane(node, decode.node),
            transfer_id=None if transfer is None else transfer.transfer_id,
        )
        self._later(lambda: call.start(self._turns[name]))

    def _lane(self, source: SimulatedNode, target: SimulatedNode) -> SimulatedLane:
        key = (source.key.node_id, target.key.node_id)
        if key not in self._lanes:
            self._lanes[key] = SimulatedLane(
                self._clock,
                source=source.source,
                target=target.target,
                inbox=target.inbox,
                layout=source.layout,
                message_s=self._cluster.overheads.lane_message_ms / 1e3,
            )
        return self._lanes[key]

    def _reserved(self, call: DecodeCall, available_blocks: int, status_seq: int) -> None:
        request = call.request
        assert request.claim is not None and request.pair is not None
        entry = request.pair.decode
        assert entry is not None
        if status_seq > entry.status_seq:
            entry.status_seq = status_seq
            entry.available_blocks = available_blocks
            entry.num_running += 1
        request.claim.let_go(decode=True)
        if request.pair.prefill is not None:
            self._prefill(request, call)

    def _refused(self, request: PlannedRequest) -> None:
        assert request.claim is not None and request.pair is not None
        entry = request.pair.decode
        assert entry is not None
        entry.refused_seq = entry.status_seq
        request.claim.let_go(decode=True, prefill=True)
        self._join(request)

    def _preempted(self, request: PlannedRequest) -> None:
        assert request.claim is not None
        request.num_restarts += 1
        request.claim.let_go(decode=True, prefill=True)
        self._join(request)

    def _finished(self, request: PlannedRequest) -> None:
        assert request.claim is not None
        request.claim.let_go(decode=True, prefill=True)
        self._end(request, outcome="ok")

    def _expire(self, request: PlannedRequest) -> None:
        if request.place is not None and request.place in self._line:
            self._line.leave(request.place)
            self._end(request, outcome="failed", error="DEADLINE_EXCEEDED")
            self._pair_next()

    def _end(self, request: PlannedRequest, *, outcome: str, error: str = "") -> None:
        self.num_ended += 1
        request.end(self._clock.now_s, outcome=outcome, error=error)
        self._on_end(request)

    def _take_status(self, entry: NodeEntry, load: NodeLoad) -> None:
        if load.seq <= entry.status_seq:
            return
        before = entry.pairing_view
        entry.take_in(load)
        if before != entry.pairing_view:
            self._registry.changed()
