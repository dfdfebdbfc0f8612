"""What disagg top shows, from two looks at the nodes."""

import io
from dataclasses import replace

from rich.console import Console

from coordinator.cli_top import busy_share, frame
from coordinator.events import Node

IDLE = Node(
    node_id="decode-0",
    role="decode",
    state="serving",
    address="127.0.0.1:1",
    model="m",
    num_blocks=100,
    available_blocks=100,
    num_running=0,
    num_queued=0,
    loaded_percent=100,
    num_steps=10,
)
BUSY = replace(IDLE, available_blocks=60, num_running=3, num_decoding=2, num_steps=52)


def test_blocks_and_rates_are_told_per_node():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(frame([IDLE], [BUSY]))
    (line,) = [line for line in console.export_text().splitlines() if "decode-0" in line]
    assert line.split()[-7:] == ["40", "/", "100", "3", "2", "0", "42"]


def test_a_role_is_busy_by_the_share_of_its_nodes_that_compute():
    other = replace(IDLE, address="127.0.0.1:2")
    assert busy_share([BUSY, other], "decode") == 0.5
    assert busy_share([BUSY], "prefill") == 0.0
