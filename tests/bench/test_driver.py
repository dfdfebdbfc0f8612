"""The driver against a real server of our protocol that answers a word per prompt word."""

import asyncio

import pytest

from bench.driver import Live, drive_closed, drive_open
from bench.live import describe, tokens_so_far
from bench.prompts import Prompted
from bench.records import RequestRecord
from bench.targets import Chunks, Ending, OurTarget
from bench.workload import Arrival
from tests.coordinator.fake_coordinator import serve_fake


def prompted(text: str, *, num_output: int = 1, at_s: float = 0.0, label: str = "") -> Prompted:
    arrival = Arrival(at_s=at_s, num_input=0, num_output=num_output, label=label, text=text)
    return Prompted(arrival=arrival, prompt=text)


class Gate:
    """A target whose requests wait until all of a number are open."""

    def __init__(self, number: int) -> None:
        self.num_open = self.most_open = 0
        self._number = number
        self._all_open = asyncio.Event()

    async def ask(self, prompt: object, num_tokens: int, chunks: Chunks) -> Ending:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if self.num_open == self._number:
            self._all_open.set()
        await self._all_open.wait()
        chunks.append((0.0, num_tokens))
        self.num_open -= 1
        return Ending()


async def drive(requests, *, drain_s=20.0):
    async with serve_fake() as fake:
        target = OurTarget(fake.address)
        try:
            return await drive_open(target, requests, drain_s=drain_s)
        finally:
            await target.close()


async def test_every_outcome_is_recorded_and_keeps_what_came():
    requests = [
        prompted("a b", num_output=2, label="short"),
        prompted("refuse"),
        prompted("cut"),
        prompted("a b", num_output=3),
        prompted("a hang", num_output=9),
    ]
    driven = await drive(requests, drain_s=0.5)
    assert [record.index for record in driven.records] == [0, 1, 2, 3, 4]
    assert [record.outcome for record in driven.records] == [
        "ok",
        "refused",
        "failed",
        "failed",
        "unfinished",
    ]
    assert [record.num_generated for record in driven.records] == [2, 0, 1, 2, 2]
    served, _, _, short, hanging = driven.records
    assert served.label == "short"
    # The server's count, where the length of a text was not known.
    assert served.num_input == 9
    assert short.error == "2 tokens came of 3"
    assert hanging.ended_s is None
    assert driven.wall_s >= max(record.ended_s or 0 for record in driven.records)


async def test_requests_are_offered_at_their_times_and_sent_no_sooner():
    requests = [prompted("a", at_s=at_s) for at_s in (0.0, 0.05, 0.1)]
    driven = await drive(requests)
    assert [record.offered_s for record in driven.records] == [0.0, 0.05, 0.1]
    for record in driven.records:
        assert record.sent_s >= record.offered_s
        assert record.ttft_s >= record.chunks[0][0] - record.sent_s


async def test_an_open_loop_does_not_wait_for_answers():
    gate = Gate(5)
    driven = await drive_open(gate, [prompted("a")] * 5)
    assert gate.most_open == 5
    assert all(record.outcome == "ok" for record in driven.records)


async def test_a_closed_loop_keeps_so_many_open_and_no_more():
    gate = Gate(3)
    driven = await drive_closed(gate, [prompted("a")] * 10, concurrency=3)
    assert gate.most_open == 3
    assert len(driven.records) == 10
    assert all(record.offered_s == record.sent_s for record in driven.records)


async def test_a_closed_loop_sends_nothing_after_its_duration():
    async with serve_fake() as fake:
        target = OurTarget(fake.address)
        driven = await drive_closed(
            target, [prompted("a hang", num_output=2)] * 9, concurrency=2, duration_s=0.2,
            drain_s=0.1,
        )  # fmt: skip
        await target.close()
    assert [record.outcome for record in driven.records] == ["unfinished"] * 2


async def test_no_requests_are_an_empty_run():
    driven = await drive_open(Gate(1), [])
    assert list(driven.records) == []


async def test_a_fault_of_ours_is_raised_and_not_counted():
    class Broken:
        async def ask(self, prompt: object, num_tokens: int, chunks: Chunks) -> Ending:
            raise KeyError("ours")

    with pytest.raises(KeyError):
        await drive_open(Broken(), [prompted("a")])


async def test_a_watcher_sees_the_run_and_ends_with_it():
    seen: list[int] = []
    ended = asyncio.Event()

    async def watch(live: Live) -> None:
        seen.append(live.num_planned)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await drive_open(Gate(1), [prompted("a")], watch=watch)
    assert seen == [1]
    assert ended.is_set()


def test_the_live_line_tells_what_has_come_so_far():
    done = RequestRecord(
        index=0, offered_s=0, sent_s=0, num_input=1, num_output=2, chunks=((0.25, 1), (0.5, 1))
    )
    refused = RequestRecord(
        index=1, offered_s=0, sent_s=0, num_input=1, num_output=2, outcome="refused"
    )
    live = Live(num_planned=4, in_flight={2: [(1.0, 1), (2.0, 3)]}, records=[done, refused])
    assert tokens_so_far(live) == 6
    assert describe(live, tok_s=12.3) == "1 in flight, 12 tok/s, TTFT p50 250 ms, 1 not served"
