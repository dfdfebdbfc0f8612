"""disagg top: the nodes of a cluster and what they do, once a second.

    ListNodes --> Look(nodes, when) --+
                       previous Look --+--> frame

Rates are differences between two looks. Utilisation of a role is the share of its nodes that have
something to compute.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.client import Client
from coordinator.events import Node

INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The nodes at a moment, in seconds of a monotonic clock."""

    at_s: float
    nodes: Sequence[Node]


def run(client: Client, *, once: bool) -> None:
    """Until Ctrl-C, or one frame with rates of one interval. Raises GenerationError.

    Without a terminal frames follow each other.
    """
    console, before = Console(), _look(client)
    if not console.is_terminal:  # a pipe has no width to cut to
        console.width = 160
    if once or not console.is_terminal:
        for now in _looks(client):
            console.print(frame(before, now))
            before = now
            if once:
                return
    live = Live(frame(before, before), console=console, auto_refresh=False, screen=True)
    # Not its context manager: a Ctrl-C while it draws the first frame would leave the terminal on
    # the alternate screen.
    try:
        live.start(refresh=True)
        for now in _looks(client):
            live.update(frame(before, now), refresh=True)
            before = now
    finally:
        live.stop()


def _looks(client: Client) -> Iterator[Look]:
    while True:
        time.sleep(INTERVAL_S)
        yield _look(client)


def _look(client: Client) -> Look:
    nodes = client.list_nodes()
    return Look(at_s=time.monotonic(), nodes=nodes)


def frame(before: Look, now: Look) -> Group:
    """One picture of now; before is an earlier look."""
    table = Table("node", "role", "state", "KV blocks", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("used / all", "running", "decoding", "queued tokens", "step", "steps/s"):
        table.add_column(name, justify="right")
    for node in sorted(now.nodes, key=lambda node: (node.role != "prefill", node.node_id)):
        used = node.num_blocks - node.available_blocks
        predicted_s = node.step_predicted_s
        table.add_row(
            node.node_id,
            node.role,
            node.state,
            ProgressBar(total=max(1, node.num_blocks), completed=used, width=24),
            f"{used} / {node.num_blocks}",
            str(node.num_running),
            str(node.num_decoding),
            str(node.queued_tokens),
            "-" if predicted_s is None else f"{predicted_s * 1000:.1f} ms",
            f"{steps_per_s(before, now, node):.0f}",
        )
    shares = ", ".join(
        f"{role} {busy_share(now.nodes, role):.0%}" for role in ("prefill", "decode")
    )
    return Group(table, Text(f"busy: {shares}"))


def steps_per_s(before: Look, now: Look, node: Node) -> float:
    """Of a node of now; 0 for one that was not there before, or was started again since."""
    earlier = {(old.node_id, old.address): old.num_steps for old in before.nodes}
    num_steps = node.num_steps - earlier.get((node.node_id, node.address), node.num_steps)
    elapsed_s = now.at_s - before.at_s
    return max(0, num_steps) / elapsed_s if elapsed_s > 0 else 0.0


def busy_share(nodes: Sequence[Node], role: str) -> float:
    """Share of a role's nodes that have something to compute."""
    of_role = [node for node in nodes if node.role == role]
    busy = [node for node in of_role if node.queued_tokens or node.num_decoding]
    return len(busy) / max(1, len(of_role))
