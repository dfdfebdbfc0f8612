"""Faults under a real data plane, at one chunk, for tests: the protocol does not know of them."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence

from kvtransfer.plane import PlaneLink, SendingPlane

FAULTS = ("drop", "delay", "duplicate", "reorder", "corrupt", "stall", "die")
DELAY_S = 0.3


class FaultyPlane:
    """A SendingPlane that does fault to the chunk of seq at, and to every one after if again."""

    def __init__(self, inner: SendingPlane, fault: str, *, at: int, seed: int = 0) -> None:
        assert fault in FAULTS
        self._inner = inner
        self._fault = fault
        self._at = at
        self._rng = random.Random(seed)
        self._held: tuple[int, list[memoryview]] | None = None

    async def connect(self) -> None:
        await self._inner.connect()

    async def send(self, seq: int, blocks: Sequence[memoryview]) -> None:
        if seq == self._at:
            await self._misbehave(seq, blocks)
            return
        await self._inner.send(seq, blocks)
        if self._held is not None:
            held, self._held = self._held, None
            await self._inner.send(*held)

    def acknowledged(self, seq: int) -> None:
        self._inner.acknowledged(seq)

    async def close(self) -> None:
        await self._inner.close()

    async def _misbehave(self, seq: int, blocks: Sequence[memoryview]) -> None:
        match self._fault:
            case "drop":
                return
            case "delay":
                await asyncio.sleep(DELAY_S)
                await self._inner.send(seq, blocks)
            case "duplicate":
                await self._inner.send(seq, blocks)
                await self._inner.send(seq, blocks)
            case "reorder":
                self._held = (seq, [memoryview(bytearray(block)) for block in blocks])
            case "corrupt":
                copies = [bytearray(block) for block in blocks]
                victim = self._rng.choice(copies)
                victim[self._rng.randrange(len(victim))] ^= 1 << self._rng.randrange(8)
                await self._inner.send(seq, [memoryview(copy) for copy in copies])
            case "stall":
                await asyncio.Event().wait()
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)


def faulty(
    make: Callable[[str, PlaneLink], SendingPlane], fault: str, *, at: int, seed: int = 0
) -> Callable[[str, PlaneLink], SendingPlane]:
    """make, whose first plane has the fault; a lane that is rebuilt is sound."""
    made = 0

    def make_faulty(name: str, link: PlaneLink) -> SendingPlane:
        nonlocal made
        made += 1
        plane = make(name, link)
        return FaultyPlane(plane, fault, at=at, seed=seed) if made == 1 else plane

    return make_faulty
