"""Who is there, and what each node has left: the state that pairing decides on.

    Register stream: register, update, remove        pairing: reads nodes
    requests: hold / let_go (what is under way and no status tells of yet)

Plain state on the event loop, rebuilt from the nodes' registrations whenever the coordinator
starts. A node is known by (id, incarnation): what an earlier life says is not heard.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.prefix_index import PrefixIndex
from engine.cost_model import CostProfile
from kvtransfer.layout import KvLayout
from kvtransfer.messages import NodeKey

# Until a node has told its own: tokens count, and nothing else is known.
NO_PROFILE = CostProfile(
    base_ms=1.0,
    decode_row_ms=0.01,
    prefill_token_ms=0.1,
    decode_context_ms=0.0,
    prefill_context_ms=0.0,
)
STUCK_FLOOR_S = 5.0
AVOID_S = 0.5
MAX_AVOID_S = 8.0
STUCK_FACTOR = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """What a status tells of a node's work; seq orders it."""

    seq: int
    available_blocks: int
    num_running: int
    num_queued: int
    queued_tokens: int
    num_decoding: int
    decode_context: int


@dataclass(slots=True, kw_only=True, eq=False)
class NodeEntry:
    """One registered node: its registration, its last status, and this coordinator's claims."""

    key: NodeKey
    is_prefill: bool
    address: str
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    max_running: int
    step_budget_ms: float = 50.0
    # Last status.
    status_seq: int = 0
    is_serving: bool = False
    is_draining: bool = False
    # Asked through this coordinator; the node may not know yet.
    drain_asked: bool = False
    available_blocks: int = 0
    num_running: int = 0
    num_queued: int = 0
    queued_tokens: int = 0
    num_steps: int = 0
    step_age_s: float | None = None
    step_predicted_s: float = 0.0
    loaded_percent: int = 0
    profile: CostProfile = NO_PROFILE
    num_decoding: int = 0
    decode_context: int = 0
    # Requests of this coordinator: blocks asked for and not answered, prompts being prefilled,
    # their tokens, but for cached ones, that no status has told of yet.
    held_blocks: int = 0
    num_held: int = 0
    num_outstanding: int = 0
    unseen_tokens: int = 0
    # Told through this coordinator, and not passed on yet.
    must_resync_cache: bool = False
    must_clear_cache: bool = False
    # When it was last given a request, counted in requests; nodes that are alike take turns.
    last_turn: int = 0
    # It refused at this status: ask again when it tells of another.
    refused_seq: int | None = None
    # Calls to it that broke, one after the other; while avoided it gets no new ones.
    num_broken: int = 0
    is_avoided: bool = False
    is_lost: bool = False
    on_lost: set[Callable[[], None]] = field(default_factory=set)
    # What it has cached, as far as it has told.
    index: PrefixIndex = field(init=False)
    # Equal for nodes that can take in each other's KV.
    kv_kind: tuple[object, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.index = PrefixIndex(max_hashes=self.num_blocks)
        self.kv_kind = self.layout.kind

    @property
    def is_usable(self) -> bool:
        """May be paired: serving, and not stuck in a step."""
        return self.is_serving and not self.is_stuck

    @property
    def is_stuck(self) -> bool:
        """A step takes far longer than was predicted: not busy, but broken."""
        if self.step_age_s is None:
            return False
        return self.step_age_s > max(STUCK_FLOOR_S, STUCK_FACTOR * self.step_predicted_s)

    @property
    def ahead_ms(self) -> float:
        """Predicted compute of the prompt tokens that wait here and are not cached: what the node
        has told, and what this coordinator has sent since."""
        return (self.queued_tokens + self.unseen_tokens) * self.profile.prefill_token_ms

    def take_in(self, load: NodeLoad) -> None:
        """What this coordinator had sent is in it, or counts no more."""
        self.status_seq = load.seq
        self.available_blocks = load.available_blocks
        self.num_running = load.num_running
        self.num_queued = load.num_queued
        self.queued_tokens = load.queued_tokens
        self.unseen_tokens = 0
        self.num_decoding = load.num_decoding
        self.decode_context = load.decode_context

    @property
    def pairing_view(self) -> tuple[object, ...]:
        """What pairing decides by: it is asked again when this is another."""
        return (
            self.is_usable,
            self.available_blocks,
            self.num_running,
            self.is_refusing,
            self.ahead_ms,
        )

    @property
    def is_refusing(self) -> bool:
        if self.is_avoided:
            return True
        return self.refused_seq is not None and self.status_seq <= self.refused_seq


class Registry:
    """All registered nodes by id. version grows with every change of membership."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeEntry] = {}
        self.version = 0
        self._turns = itertools.count(1)
        self._listeners: set[Callable[[], None]] = set()

    def register(self, entry: NodeEntry) -> None:
        """Takes a node in; an earlier life of the same node is lost."""
        previous = self.nodes.get(entry.key.node_id)
        if previous is not None:
            self.remove(previous)
        self.nodes[entry.key.node_id] = entry
        self.version += 1
        self.changed()

    def remove(self, entry: NodeEntry) -> None:
        """Takes a node out and tells whoever depends on it. Nothing if it is out."""
        if self.nodes.get(entry.key.node_id) is not entry:
            return
        del self.nodes[entry.key.node_id]
        self.version += 1
        entry.is_lost = True
        for callback in list(entry.on_lost):
            callback()
        self.changed()

    def given(self, *nodes: NodeEntry | None) -> None:
        """These nodes are given a request: among equals it is the others' turn."""
        turn = next(self._turns)
        for node in nodes:
            if node is not None:
                node.last_turn = turn

    def avoid(self, entry: NodeEntry) -> None:
        """A call to the node broke, though it may go on telling that it is well: it gets nothing
        for a while, which doubles each time until a call works()."""
        seconds = min(AVOID_S * 2**entry.num_broken, MAX_AVOID_S)
        entry.num_broken += 1
        if not entry.is_avoided:
            entry.is_avoided = True
            asyncio.get_running_loop().call_later(seconds, self._forgive, entry)

    def _forgive(self, entry: NodeEntry) -> None:
        entry.is_avoided = False
        self.changed()

    def changed(self) -> None:
        """Tells every listener that pairing could decide otherwise now."""
        for listener in list(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)
