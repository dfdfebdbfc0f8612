"""How a transfer ended, for a coroutine to wait for: pass ending.set as the transfer's on_end."""

import asyncio


class Ending:
    """Set once, by the lane; a waiter that is cancelled leaves it as it is."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._reason: str | None = None

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    @property
    def reason(self) -> str | None:
        """Why it failed; None if it did not, or has not ended yet."""
        return self._reason

    def set(self, reason: str | None) -> None:
        self._reason = reason
        self._event.set()

    async def wait(self) -> str | None:
        """The reason, once it has ended; the caller's call has the deadline."""
        await self._event.wait()
        return self._reason
