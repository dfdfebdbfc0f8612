"""Who is there, and what each node has left: the state that pairing decides on.

    Register stream: register, update, remove        pairing: reads nodes
    requests: hold / let_go (what is under way and no status tells of yet)

Plain state on the event loop, rebuilt from the nodes' registrations whenever the coordinator
starts. A node is known by (id, incarnation): what an earlier life says is not heard.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.layout import KvLayout
from kvtransfer.messages import NodeKey


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
    # Last status.
    status_seq: int = 0
    is_serving: bool = False
    is_draining: bool = False
    available_blocks: int = 0
    num_running: int = 0
    num_queued: int = 0
    queued_tokens: int = 0
    num_steps: int = 0
    step_age_s: float | None = None
    loaded_percent: int = 0
    # Requests of this coordinator: blocks asked for and not answered, prompts being prefilled.
    held_blocks: int = 0
    num_held: int = 0
    num_outstanding: int = 0
    outstanding_tokens: int = 0
    # It refused at this status: ask again when it tells of another.
    refused_seq: int | None = None
    is_lost: bool = False
    on_lost: set[Callable[[], None]] = field(default_factory=set)

    @property
    def is_refusing(self) -> bool:
        return self.refused_seq is not None and self.status_seq <= self.refused_seq


class Registry:
    """All registered nodes by id. version grows with every change of membership."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeEntry] = {}
        self.version = 0
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

    def changed(self) -> None:
        """Tells every listener that pairing could decide otherwise now."""
        for listener in list(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)
