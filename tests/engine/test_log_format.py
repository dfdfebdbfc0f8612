"""A record as a line of text and as a JSON object."""

import json
import logging
import sys

from engine.log_format import log_formatter


def record(message: str, *args: object, request: str | None = None) -> logging.LogRecord:
    made = logging.LogRecord("engine.node", logging.INFO, "node.py", 1, message, args, None)
    made.created = 86_400.25
    if request is not None:
        made.request = request
    return made


def test_a_json_line_holds_what_the_text_holds_and_names_the_request():
    line = log_formatter("json", program="decode-0").format(record("left %r", "a\nb", request="r1"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-02T00:00:00.250+00:00",
        "level": "INFO",
        "logger": "engine.node",
        "program": "decode-0",
        "message": "left 'a\\nb'",
        "request": "r1",
    }


def test_a_record_about_no_request_names_none():
    line = json.loads(log_formatter("json", program="decode-0").format(record("serving")))
    assert "request" not in line


def test_an_exception_is_part_of_the_one_line():
    made = record("step failed")
    try:
        raise ValueError("bad\nstep")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = log_formatter("json", program="decode-0").format(made)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: bad\nstep")


def test_text_is_the_line_of_before():
    line = log_formatter("text", program="decode-0").format(record("left %d", 3, request="r1"))
    assert line.endswith(" decode-0 INFO left 3")
