"""What disagg top shows, from two looks at the nodes."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from coordinator.cli_top import Look, busy_share, frame, steps_per_s
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
BUSY = replace(
    IDLE,
    available_blocks=60,
    num_running=3,
    num_decoding=2,
    num_steps=94,
    step_predicted_s=0.0125,
)
BEFORE = Look(at_s=100.0, nodes=[IDLE])


def test_blocks_and_rates_are_told_per_node():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(frame(BEFORE, Look(at_s=102.0, nodes=[BUSY])))
    (line,) = [line for line in console.export_text().splitlines() if "decode-0" in line]
    assert line.split()[:3] == ["decode-0", "decode", "serving"]
    # 84 steps in 2 s.
    assert line.split()[-9:] == ["40", "/", "100", "3", "2", "0", "12.5", "ms", "42"]


@pytest.mark.parametrize(
    "node",
    [
        replace(BUSY, num_steps=3),  # started again, at the same address
        replace(BUSY, node_id="decode-1"),
    ],
)
def test_a_node_that_was_not_there_before_has_no_rate_yet(node):
    assert steps_per_s(BEFORE, Look(at_s=102.0, nodes=[node]), node) == 0.0


def test_two_looks_at_one_moment_have_no_rate():
    assert steps_per_s(BEFORE, replace(BEFORE, nodes=[BUSY]), BUSY) == 0.0


def test_a_role_is_busy_by_the_share_of_its_nodes_that_compute():
    other = replace(IDLE, address="127.0.0.1:2")
    assert busy_share([BUSY, other], "decode") == 0.5
    assert busy_share([BUSY], "prefill") == 0.0
