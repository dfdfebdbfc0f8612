"""How the two ends of a process group find each other: keys over the lane's stream, no TCPStore.

    torch, on its thread:  set(key) --say--> Rendezvous --> other end: hear --> learn(key)
                           get(key)  waits until it was learnt
    each end, at last:     Rendezvous(key "") : my group is open, I say nothing more

Any keys, any number up to MAX_KEYS, both ways. torch waits for keys on the plane's thread, never
on the event loop.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import timedelta

import torch.distributed as dist

from kvtransfer.plane import PlaneError, PlaneLink
from protos.pd.v1 import lane_pb2

OPEN_DEADLINE_S = 4.0
# gloo needs one from each end, NCCL one from the sender.
MAX_KEYS = 16
_OPEN = ""


class LaneStore(dist.Store):  # type: ignore[name-defined]
    """A store of what both ends have said. Ours goes out by say, until close()."""

    def __init__(self, *, say: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._say = say
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()
        self._is_closed = False

    def learn(self, key: str, value: bytes) -> None:
        with self._news:
            if len(self._values) >= MAX_KEYS:
                raise PlaneError(f"more than {MAX_KEYS} keys of a rendezvous")
            self._values[key] = value
            self._news.notify_all()

    def close(self) -> None:
        """Nothing is said any more, and who waits for a key gets an error."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.learn(key, value)
        if not self._is_closed:
            self._say(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._news:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._news:
            self._news.wait_for(lambda: self._is_closed or self.check(keys), OPEN_DEADLINE_S)
            if not self.check(keys):
                raise TimeoutError(f"no rendezvous for {keys} in {OPEN_DEADLINE_S:g} s")


async def open_over_lane(
    link: PlaneLink,
    open_group: Callable[[LaneStore], None],
    *,
    thread: Executor,
    hears_first: bool = False,
) -> None:
    """Runs open_group(store) on thread; returns when both ends have done so.

    hears_first: the thread is not entered, and nobody else's work there held up, before the other
    end's first key is here. Raises PlaneError, what link.hear raises, and RuntimeError or
    TimeoutError of torch. The caller has the deadline; when it cancels, open_group may still run.
    """
    loop = asyncio.get_running_loop()

    def say(key: str, value: bytes = b"") -> None:
        message = lane_pb2.Rendezvous(key=key, value=value)
        loop.call_soon_threadsafe(link.say, message)

    store = LaneStore(say=say)

    def open_and_tell() -> None:
        open_group(store)
        store.close()
        say(_OPEN)

    async def listen() -> None:
        while (message := await link.hear()).key != _OPEN:
            store.learn(message.key, message.value)

    if hears_first:
        message = await link.hear()
        store.learn(message.key, message.value)
    opening = loop.run_in_executor(thread, open_and_tell)
    # Its error is ours to raise only while somebody waits for it.
    opening.add_done_callback(lambda done: done.cancelled() or done.exception())
    listening = asyncio.create_task(listen())
    try:
        await asyncio.wait((opening, listening), return_when=asyncio.FIRST_EXCEPTION)
        for part in (opening, listening):
            if part.done():
                part.result()
    finally:
        listening.cancel()
        store.close()
