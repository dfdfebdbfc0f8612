"""What is delivered: every position once, text that adds up, and how it ended."""

import pytest

from coordinator.answer import Answer, Marks
from coordinator.tokenizer import ModelTokenizer
from engine.catalog import resolve_model
from protos.errors import ServingError
from protos.pd.v1 import types_pb2

TOKENIZER = ModelTokenizer(resolve_model("emulated", allow_download=False).folder)
LENGTH, STOP = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP


def answer(marks: Marks | None = None, **stop: object) -> Answer:
    """After a prompt of 10 tokens; ids are bytes."""
    return Answer(
        choice=0,
        num_prompt_tokens=10,
        detokenizer=TOKENIZER.detokenizer(),
        stop=types_pb2.StopConditions(**stop),
        marks=marks or Marks(arrived=100.0),
    )


def run(position: int, text: bytes, reason: types_pb2.FinishReason = 0) -> types_pb2.TokenRun:
    return types_pb2.TokenRun(position=position, token_ids=list(text), finish_reason=reason)


def test_a_token_that_is_told_twice_is_delivered_once():
    given = answer()
    first = given.push(run(10, b"a"), now=101)
    assert (first.position, list(first.token_ids), first.text) == (10, [97], "a")
    assert given.push(run(10, b"a"), now=102) is None
    rest = given.push(run(10, b"abc"), now=103)
    assert (rest.position, list(rest.token_ids), rest.text) == (11, [98, 99], "bc")
    assert given.token_ids == [97, 98, 99]


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
    assert given.finish.stop_token_id == ord("!")


def test_what_comes_after_the_end_is_not_delivered():
    given = answer()
    given.push(run(10, b"a", LENGTH), now=101)
    assert given.push(run(11, b"b"), now=102) is None


def test_stages_of_the_timing_add_up():
    marks = Marks(arrived=100.0, paired=101.0, reserved=102.0)
    given = answer(marks)
    given.push(run(10, b"a"), now=104)
    marks.sealed = 105.0
    given.push(run(11, b"bc"), now=107)
    given.push(run(13, b"d", LENGTH), now=110)
    timing = marks.to_timing()
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


def test_a_stop_string_ends_the_choice_at_the_token_that_completes_it():
    given = answer(stop_strings=["never", "cd"])
    first = given.push(run(10, b"abc"), now=101)
    assert (list(first.token_ids), first.text) == (list(b"abc"), "ab")
    last = given.push(run(13, b"def"), now=102)
    assert (list(last.token_ids), last.text) == (list(b"d"), "")
    assert given.finish.reason == STOP
    assert given.finish.stop_string == "cd"
    assert given.token_ids == list(b"abcd")


def test_a_stop_string_does_not_stop_before_min_tokens():
    given = answer(stop_strings=["b"], min_tokens=4)
    assert given.push(run(10, b"abab"), now=101).text == "aba"
    assert given.finish.stop_string == "b"


def test_logprobs_stay_with_their_tokens_when_some_are_skipped():
    def told(text: bytes) -> list[types_pb2.PositionLogprobs]:
        return [
            types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=token))
            for token in text
        ]

    given = answer()
    given.push(types_pb2.TokenRun(position=10, token_ids=b"ab", logprobs=told(b"ab")), now=101)
    both = types_pb2.TokenRun(position=10, token_ids=b"abcd", logprobs=told(b"abcd"))
    delta = given.push(both, now=102)
    assert [one.chosen.token_id for one in delta.logprobs] == list(b"cd")
