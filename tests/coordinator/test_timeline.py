"""Timelines: what happened in order, for requests that run and for the last that have ended."""

import time

import pytest

from coordinator.timeline import MAX_ENDED, MAX_EVENTS, Timeline, Timelines
from protos.errors import Reason, ServingError


def run(timelines: Timelines, request_id: str) -> Timeline:
    with timelines.running(request_id) as timeline:
        pass
    return timeline


def test_events_are_in_order_and_count_from_the_arrival():
    timeline = Timeline("r", started=time.monotonic() - 7)
    timeline.add("queued", waiting=3)
    timeline.add("paired", prefill="p0#1", decode=None)
    assert [event.what for event in timeline.events] == ["queued", "paired"]
    assert 7 <= timeline.events[0].at_s <= timeline.events[1].at_s < 67


def test_details_are_text():
    timeline = Timeline("r")
    timeline.add("x", number=3, nothing=None, text="t")
    assert timeline.events[0].details == {"number": "3", "nothing": "None", "text": "t"}


def test_a_long_timeline_keeps_its_beginning_and_its_end():
    timeline = Timeline("r")
    for index in range(MAX_EVENTS + 5):
        timeline.add(f"event {index}")
    timeline.add("ended", status="OK")
    assert len(timeline.events) == MAX_EVENTS + 1
    assert timeline.events[-2].what == f"event {MAX_EVENTS - 1}"
    assert timeline.events[-1].what == "ended"


def test_a_request_is_found_while_it_runs_and_after():
    timelines = Timelines()
    with timelines.running("r") as timeline:
        timeline.add("queued")
        assert timelines.find("r") is timeline
        assert timeline.is_running
    assert timelines.find("r") is timeline
    assert not timeline.is_running
    # It is the same object that a caller may still hold.
    assert [event.what for event in timeline.events] == ["queued"]


def test_a_request_that_fails_has_ended():
    timelines = Timelines()
    with pytest.raises(ZeroDivisionError), timelines.running("r"):
        raise ZeroDivisionError
    assert not timelines.find("r").is_running


def test_an_id_runs_once_at_a_time_and_may_run_again():
    timelines = Timelines()
    with timelines.running("r") as first:
        with pytest.raises(ServingError, match="'r' is running") as error, timelines.running("r"):
            pass
        assert error.value.reason is Reason.REQUEST_EXISTS
        assert error.value.metadata == {"field": "request_id"}
        # The one that was refused has not ended the one that runs.
        assert timelines.find("r") is first
        assert first.is_running
    with timelines.running("r") as second:
        assert timelines.find("r") is second
    assert timelines.find("r") is second
    assert second is not first


def test_an_unknown_request_is_named_by_the_field():
    with pytest.raises(ServingError, match="no request 'r' runs") as error:
        Timelines().find("r")
    assert error.value.reason is Reason.UNKNOWN_REQUEST
    assert error.value.metadata == {"field": "request_id"}
    with pytest.raises(ServingError) as error:
        Timelines().find("x" * 10_000)
    assert len(error.value.message) < 300


def test_the_requests_that_ended_first_are_forgotten_first():
    timelines = Timelines()
    with timelines.running("running"):
        for index in range(MAX_ENDED):
            run(timelines, f"r{index}")
        # Ended once more, and so the last.
        run(timelines, "r0")
        run(timelines, "one more")
        assert timelines.find("r0")
        assert timelines.find("r2")
        with pytest.raises(ServingError):
            timelines.find("r1")
        assert timelines.find("running").is_running
