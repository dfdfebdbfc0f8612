"""Pages are made ahead of use, and what they hold stays."""

import mmap
import time
from pathlib import Path

import pytest
from test_lane import LAYOUT

from kvtransfer import host_pages
from kvtransfer.host_pages import HostPages
from kvtransfer.memory import HostMemory

PIECE = 4 * 1024 * 1024


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def wait_for_resident(num_bytes: int) -> None:
    """The test's own time limit is the wait's."""
    while resident_bytes() < num_bytes:
        time.sleep(0.001)


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(LAYOUT, 16 * PIECE // LAYOUT.block_bytes)


def test_pages_are_made_ahead_of_what_was_reached_and_no_further(memory, monkeypatch):
    monkeypatch.setattr(host_pages, "AHEAD_BYTES", 4 * PIECE)
    before = resident_bytes()
    pages = HostPages(memory)
    pages.start()
    wait_for_resident(before + 4 * PIECE)
    pages.reached(4 * PIECE // LAYOUT.block_bytes)
    wait_for_resident(before + 8 * PIECE)
    # Huge pages, where the kernel gives them, end at most one further.
    assert resident_bytes() < before + 11 * PIECE


def test_blocks_that_were_written_before_keep_their_bytes(memory):
    memory.block(0)[:] = b"\x07" * LAYOUT.block_bytes
    before = resident_bytes()
    pages = HostPages(memory)
    pages.start()
    wait_for_resident(before + 15 * PIECE)
    assert memory.block(0) == b"\x07" * LAYOUT.block_bytes
