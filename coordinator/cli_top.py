"""disagg top: the nodes of a cluster and what they do, once a second.

Rates are differences between two looks. Utilisation of a role is the share of its nodes that have
something to compute.
"""

import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.client import Client
from coordinator.events import Node

INTERVAL_S = 1.0


def run(client: Client, *, once: bool) -> None:
    """Until Ctrl-C, or one frame with rates of one interval. Raises GenerationError."""
    before = client.list_nodes()
    if once:
        time.sleep(INTERVAL_S)
        console = Console()
        if not console.is_terminal:
            console.width = 160
        console.print(frame(before, client.list_nodes()))
        return
    with Live(frame(before, before), refresh_per_second=2, screen=True) as live:
        while True:
            time.sleep(INTERVAL_S)
            now = client.list_nodes()
            live.update(frame(before, now))
            before = now


def frame(before: Sequence[Node], now: Sequence[Node]) -> Group:
    """One picture; before is a look one interval ago."""
    steps_before = {node.address: node.num_steps for node in before}
    table = Table("node", "state", "KV blocks in use", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("used / all", "running", "decoding", "queued tokens", "steps/s"):
        table.add_column(name, justify="right")
    for node in sorted(now, key=lambda node: (node.role != "prefill", node.node_id)):
        used = node.num_blocks - node.available_blocks
        rate = (node.num_steps - steps_before.get(node.address, node.num_steps)) / INTERVAL_S
        table.add_row(
            node.node_id,
            node.state,
            ProgressBar(total=max(1, node.num_blocks), completed=used, width=24),
            f"{used} / {node.num_blocks}",
            str(node.num_running),
            str(node.num_decoding),
            str(node.queued_tokens),
            f"{rate:.0f}",
        )
    shares = ", ".join(f"{role} {busy_share(now, role):.0%}" for role in ("prefill", "decode"))
    return Group(table, Text(f"busy: {shares}"))


def busy_share(nodes: Sequence[Node], role: str) -> float:
    """Share of a role's nodes that have something to compute."""
    of_role = [node for node in nodes if node.role == role]
    busy = [node for node in of_role if node.queued_tokens or node.num_decoding]
    return len(busy) / max(1, len(of_role))
