"""The rendezvous of a process group over two queues, in place of a lane's stream."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtransfer.lane_store import MAX_KEYS, LaneStore, open_over_lane
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory
from kvtransfer.plane import PlaneError, PlaneLink
from protos.pd.v1 import lane_pb2

LAYOUT = KvLayout(
    model="m",
    model_digest="d",
    dtype="float32",
    block_size=1,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


def two_links(*threads: ThreadPoolExecutor) -> tuple[PlaneLink, PlaneLink, list[str]]:
    """And the keys that were said, in order."""
    queues: list[asyncio.Queue[lane_pb2.Rendezvous]] = [asyncio.Queue(), asyncio.Queue()]
    said: list[str] = []

    def link(mine: int) -> PlaneLink:
        def say(message: lane_pb2.Rendezvous) -> None:
            said.append(message.key)
            queues[1 - mine].put_nowait(message)

        return PlaneLink(
            address="",
            lane_id=b"",
            thread=threads[mine],
            memory=HostMemory(LAYOUT, 1),
            say=say,
            hear=queues[mine].get,
        )

    return link(0), link(1), said


async def test_any_number_of_keys_goes_both_ways_and_both_ends_open_together():
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        ours, theirs, said = two_links(first, second)
        got: list[bytes] = []

        def open_first(store: LaneStore) -> None:
            store.set("a", "1")
            store.set("b", b"\x00\xff")
            got.append(store.get("c"))

        def open_second(store: LaneStore) -> None:
            got.append(store.get("b"))
            store.set("c", b"3")
            assert store.check(["a", "b", "c"])
            assert not store.check(["a", "d"])

        async with asyncio.timeout(10):
            await asyncio.gather(
                open_over_lane(ours, open_first, thread=first),
                open_over_lane(theirs, open_second, thread=second, hears_first=True),
            )
        assert got == [b"\x00\xff", b"3"]
        assert sorted(said) == ["", "", "a", "b", "c"]


async def test_an_end_that_hears_first_does_not_take_the_thread_before():
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        ours, theirs, _ = two_links(first, second)
        waiting = asyncio.create_task(
            open_over_lane(theirs, lambda store: None, thread=second, hears_first=True)
        )
        async with asyncio.timeout(10):
            # The thread is free for another lane meanwhile.
            await asyncio.get_running_loop().run_in_executor(second, lambda: None)
            await open_over_lane(ours, lambda store: store.set("id", b"1"), thread=first)
            await waiting


async def test_an_end_that_leaves_wakes_the_thread_that_waits_for_its_key():
    with ThreadPoolExecutor(1) as thread:
        ours, _, _ = two_links(thread, thread)
        waits = threading.Event()
        failed: list[BaseException] = []

        def open_group(store: LaneStore) -> None:
            waits.set()
            try:
                store.get("never")
            except TimeoutError as error:
                failed.append(error)
                raise

        opening = asyncio.create_task(open_over_lane(ours, open_group, thread=thread))
        await asyncio.to_thread(waits.wait, 10)
        opening.cancel()
        await asyncio.wait([opening])
    assert [str(error) for error in failed] == ["no rendezvous for ['never'] in 4 s"]


async def test_what_fails_on_the_thread_is_raised():
    def open_group(store: LaneStore) -> None:
        raise RuntimeError("no such device")

    with ThreadPoolExecutor(1) as thread:
        ours, _, _ = two_links(thread, thread)
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="no such device"):
                await open_over_lane(ours, open_group, thread=thread)


def test_a_closed_store_says_nothing_and_an_end_that_never_stops_is_refused():
    said: list[str] = []
    store = LaneStore(say=lambda key, value: said.append(key))
    store.set("a", b"1")
    store.close()
    store.set("b", b"2")
    assert said == ["a"]
    with pytest.raises(PlaneError, match="more than 16 keys"):
        for number in range(MAX_KEYS):
            store.learn(str(number), b"")
