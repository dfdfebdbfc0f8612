"""What happened to a request, moment by moment: for Explain, and for whoever reads the logs.

Timelines: of all running requests, and of the last MAX_ENDED that have ended
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from protos.errors import Reason, ServingError

MAX_ENDED = 1000
MAX_EVENTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """at_s counts from the request's arrival."""

    at_s: float
    what: str
    details: dict[str, str]


@dataclass(slots=True)
class Timeline:
    """Events in order; past MAX_EVENTS only the last ones of a kind are of interest, and none is
    added but the end."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    events: list[TimelineEvent] = field(default_factory=list)
    is_running: bool = True

    def add(self, what: str, **details: object) -> None:
        if len(self.events) >= MAX_EVENTS and what != "ended":
            return
        self.events.append(
            TimelineEvent(
                at_s=time.monotonic() - self.started,
                what=what,
                details={name: str(value) for name, value in details.items()},
            )
        )


class Timelines:
    """Owner of all timelines, by request id: an id can run once at a time."""

    def __init__(self) -> None:
        self._running: dict[str, Timeline] = {}
        self._ended: OrderedDict[str, Timeline] = OrderedDict()

    @contextmanager
    def running(self, request_id: str) -> Iterator[Timeline]:
        """A new timeline while the request runs. Raises ServingError (REQUEST_EXISTS)."""
        if request_id in self._running:
            raise ServingError(
                Reason.REQUEST_EXISTS,
                f"request_id: {request_id!r} is running",
                field="request_id",
            )
        timeline = self._running[request_id] = Timeline(request_id)
        try:
            yield timeline
        finally:
            del self._running[request_id]
            timeline.is_running = False
            self._ended.pop(request_id, None)
            self._ended[request_id] = timeline
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def find(self, request_id: str) -> Timeline:
        """Raises ServingError (UNKNOWN_REQUEST)."""
        timeline = self._running.get(request_id) or self._ended.get(request_id)
        if timeline is None:
            raise ServingError(
                Reason.UNKNOWN_REQUEST,
                f"no request {request_id[:128]!r} runs or is among the last {MAX_ENDED}",
                field="request_id",
            )
        return timeline
