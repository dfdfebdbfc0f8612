"""What is delivered: every position once, text that adds up, and how it ended."""

import pytest

from coordinator.answer import Answer, Marks
from coordinator.tokenizer import ModelTokenizer
from engine.catalog import resolve_model
from protos.errors import ServingError
from protos.pd.v1 import types_pb2

TOKENIZER = ModelTokenizer(resolve_model("emulated", allow_download=False).folder)
LENGTH, STOP = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP


def answer() -> Answer:
    """After a prompt of 10 tokens; ids are bytes."""
    marks = Marks(arrived=100.0)
    return Answer(detokenizer=TOKENIZER.detokenizer(), marks=marks, next_position=10)


def run(position: int, text: bytes, reason: types_pb2.FinishReason = 0) -> types_pb2.TokenRun:
    return types_pb2.TokenRun(position=position, token_ids=list(text), finish_reason=reason)


def test_a_token_that_is_told_twice_is_delivered_once():
    given = answer()
    first = given.push(run(10, b"a"), now=101)
    assert (first.position, list(first.token_ids), first.text) == (10, [97], "a")
    assert given.push(run(10, b"a"), now=102) is None
    rest = given.push(run(10, b"abc"), now=103)
    assert (rest.position, list(rest.token_ids), rest.text) == (11, [98, 99], "bc")
    assert given.num_tokens == 3


def test_a_gap_is_an_error():
    with pytest.raises(ServingError, match="10 to 10 are missing"):
        answer().push(run(11, b"a"), now=101)


def test_a_character_is_delivered_when_it_is_whole_and_an_incomplete_end_is_flushed():
    given = answer()
    texts = [given.push(run(10 + i, bytes([b])), now=101).text for i, b in enumerate("é".encode())]
    assert texts == ["", "é"]
    assert given.push(run(12, "é".encode()[:1], LENGTH), now=102).text == "\ufffd"


def test_a_stop_token_is_in_the_ids_and_not_in_the_text():
    given = answer()
    delta = given.push(run(10, b"ab!", STOP), now=101)
    assert (list(delta.token_ids), delta.text) == (list(b"ab!"), "ab")
    assert given.to_finish().stop_token_id == ord("!")


def test_what_comes_after_the_end_is_not_delivered():
    given = answer()
    given.push(run(10, b"a", LENGTH), now=101)
    assert given.push(run(11, b"b"), now=102) is None


def test_stages_of_the_timing_add_up():
    given = answer()
    given.marks.paired, given.marks.reserved = 101.0, 102.0
    given.push(run(10, b"a"), now=104)
    given.marks.sealed = 105.0
    given.push(run(11, b"bc"), now=107)
    given.push(run(13, b"d", LENGTH), now=110)
    timing = given.marks.to_timing()
    seconds = {name.name: value.ToSeconds() for name, value in timing.ListFields()}
    assert seconds == {
        "queue": 1,
        "reserve": 1,
        "prefill": 2,
        "transfer": 1,
        "handoff_gap": 3,
        "decode": 3,
        "ttft": 4,
        "total": 10,
    }
