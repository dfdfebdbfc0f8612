"""A trace on simulated nodes, under the coordinator's own decisions.

arrival -> WaitingLine -> Claim -> prompt computed (prefill node, or the decode node itself)
        -> kept there and on the decode node -> streams -> gone
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from bench.plan.clock import Clock
from bench.replay.node import SimulatedNode
from bench.replay.trace import BLOCK_SIZE, TracedRequest
from coordinator.need import Need
from coordinator.queue import Claim
from coordinator.registry import NodeEntry, Registry
from coordinator.waiting_line import WaitingLine
from engine.cost_model import CostProfile
from kvtransfer.blocks import Lease
from kvtransfer.layout import KvLayout
from kvtransfer.messages import NodeKey
from kvtransfer.prefix import reusable_blocks, short_hash

# A model of 7 B parameters on one GPU, roughly: what is looked at are decisions.
LAYOUT = KvLayout(
    model="replayed",
    model_digest="00",
    dtype="bfloat16",
    block_size=BLOCK_SIZE,
    num_layers=28,
    num_kv_heads=4,
    head_dim=128,
)
PROFILE = CostProfile(
    base_ms=8.0,
    decode_row_ms=0.05,
    prefill_token_ms=0.1,
    decode_context_ms=1e-5,
    prefill_context_ms=2e-6,
)
MAX_RUNNING = 256
# Longer than any request of a trace.
_MAX_MODEL_LEN = 1_000_000


class SimulatedCluster:
    """Prefill nodes first, then decode nodes. reasons counts pairings."""

    def __init__(self, *, num_prefill: int, num_decode: int, blocks_per_node: int) -> None:
        self.nodes: list[SimulatedNode] = []
        self.reasons: Counter[str] = Counter()
        self.ttfts_s: list[float] = []
        self.num_decisions = 0
        # Real time that they took.
        self.decided_s = 0.0
        self._clock = Clock()
        self._registry = Registry()
        self._line: WaitingLine[TracedRequest] = WaitingLine(
            lambda: list(self._registry.nodes.values()),
            max_waiting=1_000_000,
            max_waiting_tokens=10**12,
        )
        self._by_name: dict[str, SimulatedNode] = {}
        for name in (
            *(f"prefill-{index}" for index in range(num_prefill)),
            *(f"decode-{index}" for index in range(num_decode)),
        ):
            entry = _entry(name, num_blocks=blocks_per_node)
            self._registry.register(entry)
            node = SimulatedNode(entry, self._clock, on_change=self._registry.changed)
            self._by_name[name] = node
            self.nodes.append(node)
        self._registry.listen(self._pair)

    def run(self, trace: Sequence[TracedRequest]) -> None:
        """Until all requests have ended. Raises ServingError if one fits no node."""
        for request in trace:
            self._clock.at(request.arrival_s, partial(self._arrive, request))
        self._clock.run(while_true=lambda: True)
        assert len(self.ttfts_s) == len(trace)

    def _arrive(self, request: TracedRequest) -> None:
        need = _need(request)
        self._line.add(self._line.place(need), need, request)
        self._pair()

    def _pair(self) -> None:
        while (first := self._line.first()) is not None:
            _, need, request = first
            started = time.perf_counter()
            pair = self._line.pair_first()
            self.decided_s += time.perf_counter() - started
            self.num_decisions += 1
            if pair is None:
                return
            self.reasons[pair.reason] += 1
            self._serve(request, Claim(pair, need, self._registry))

    def _serve(self, request: TracedRequest, claim: Claim) -> None:
        pair = claim.pair
        decode, prefill = self._of(pair.decode), self._of(pair.prefill)
        landing = decode.take(request) if decode is not None else None

        def drawn() -> None:
            self.ttfts_s.append(self._clock.now_s - request.arrival_s)
            claim.let_go(prefill=True)
            if decode is not None and landing is not None:
                if prefill is not None:
                    start = landing.num_cached * BLOCK_SIZE
                    decode.keep(request, landing, start=start, end=request.num_prompt_tokens)
                self._stream(request, decode, landing)

        if prefill is not None:
            self._prefill(request, prefill, then=drawn)
        elif decode is not None and landing is not None:
            decode.compute(request, landing, on_done=drawn)
        # Last: it may pair the next one.
        claim.let_go(decode=True)

    def _prefill(
        self, request: TracedRequest, node: SimulatedNode, *, then: Callable[[], None]
    ) -> None:
        lease = node.take(request)

        def computed() -> None:
            node.give_back(lease)
            then()

        node.compute(request, lease, on_done=computed)

    def _stream(self, request: TracedRequest, decode: SimulatedNode, lease: Lease) -> None:
        decode.stream(request.num_prompt_tokens, sign=1)

        def gone() -> None:
            decode.stream(request.num_prompt_tokens, sign=-1)
            decode.give_back(lease)
            self._registry.changed()

        self._clock.after(decode.step_ms() * request.num_output_tokens / 1e3, gone)

    def _of(self, entry: NodeEntry | None) -> SimulatedNode | None:
        return None if entry is None else self._by_name[entry.key.node_id]


def _need(request: TracedRequest) -> Need:
    num_reusable = reusable_blocks(request.num_prompt_tokens, block_size=BLOCK_SIZE)
    hashes = tuple(map(short_hash, request.chain[:num_reusable]))
    return Need(
        num_prompt_tokens=request.num_prompt_tokens,
        max_num_tokens=request.num_prompt_tokens + max(2, request.num_output_tokens),
        block_hashes=lambda _: hashes,
    )


def _entry(name: str, *, num_blocks: int) -> NodeEntry:
    return NodeEntry(
        key=NodeKey(node_id=name, incarnation=1),
        is_prefill=name.startswith("prefill"),
        address="",
        layout=LAYOUT,
        num_blocks=num_blocks,
        available_blocks=num_blocks,
        max_model_len=_MAX_MODEL_LEN,
        max_running=MAX_RUNNING,
        is_serving=True,
        profile=PROFILE,
    )
