"""What is delivered: every position once, text that adds up, and how it ended."""

import pytest

from coordinator.answer import Answer, Marks
from coordinator.tokenizer import ModelTokenizer
from engine.catalog import resolve_model
from protos.errors import ServingError
from protos.pd.v1 import types_pb2

TOKENIZER = ModelTokenizer(resolve_model("emulated", allow_download=False).folder)
EOS = types_pb2.FINISH_REASON_EOS
LENGTH, STOP = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP


def answer(marks: Marks | None = None, *, choice: int = 0, **stop: object) -> Answer:
    """After a prompt of 10 tokens; ids are bytes."""
    return Answer(
        choice=choice,
        num_prompt_tokens=10,
        detokenizer=TOKENIZER.detokenizer(),
        stop=types_pb2.StopConditions(**stop),
        marks=marks or Marks(arrived=100.0),
    )


def run(position: int, text: bytes, reason: types_pb2.FinishReason = 0) -> types_pb2.TokenRun:
    return types_pb2.TokenRun(position=position, token_ids=list(text), finish_reason=reason)


def scored(position: int, text: bytes) -> types_pb2.TokenRun:
    """Each token with logprobs of its own, that name it."""
    logprobs = [
        types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=token)) for token in text
    ]
    return types_pb2.TokenRun(position=position, token_ids=list(text), logprobs=logprobs)


def test_a_token_that_is_told_twice_is_delivered_once():
    given = answer()
    first = given.push(run(10, b"a"), now=101)
    assert (first.position, list(first.token_ids), first.text) == (10, [97], "a")
    assert given.push(run(10, b"a"), now=102) is None
    rest = given.push(run(10, b"abc"), now=103)
    assert (rest.position, list(rest.token_ids), rest.text) == (11, [98, 99], "bc")
    assert given.token_ids == [97, 98, 99]
    assert given.next_position == 13
    # Of another attempt, which began before what is out.
    assert given.push(run(11, b"bc"), now=104) is None
    assert given.push(run(9, b".abcd"), now=105).text == "d"


def test_a_run_without_tokens_delivers_nothing():
    given = answer()
    assert given.push(run(10, b""), now=101) is None
    assert (given.token_ids, given.finish) == ([], None)


def test_a_gap_is_an_error_and_changes_nothing():
    given = answer()
    with pytest.raises(ServingError, match="10 to 10 are missing"):
        given.push(run(11, b"a"), now=101)
    given.push(run(10, b"ab"), now=102)
    with pytest.raises(ServingError, match="12 to 14 are missing"):
        given.push(run(15, b"a"), now=103)
    assert given.token_ids == list(b"ab")
    assert given.push(run(12, b"c"), now=104).text == "c"


def test_every_message_names_its_choice():
    given = answer(choice=3)
    assert given.push(run(10, b"a"), now=101).choice == 3
    given.push(run(11, b"b", LENGTH), now=102)
    assert (given.finish.choice, given.finish.reason) == (3, LENGTH)
    stopped = answer(choice=2, stop_strings=["a"])
    stopped.push(run(10, b"a"), now=101)
    assert stopped.finish.choice == 2


def test_a_character_is_delivered_when_it_is_whole_and_an_incomplete_end_is_flushed():
    given = answer()
    texts = [given.push(run(10 + i, bytes([b])), now=101).text for i, b in enumerate("é".encode())]
    assert texts == ["", "é"]
    assert given.push(run(12, "é".encode()[:1], LENGTH), now=102).text == "\ufffd"


@pytest.mark.parametrize("reason", [STOP, EOS])
def test_the_token_that_stops_is_in_the_ids_and_not_in_the_text(reason):
    given = answer()
    delta = given.push(run(10, b"ab!", reason), now=101)
    assert (list(delta.token_ids), delta.text) == (list(b"ab!"), "ab")
    assert (given.finish.reason, given.finish.stop_string) == (reason, "")
    # Only a stop token of the request is named: which one matched is of interest.
    assert given.finish.stop_token_id == (ord("!") if reason == STOP else 0)
    assert given.token_ids == list(b"ab!")


def test_the_last_token_of_a_full_answer_is_in_its_text():
    assert answer().push(run(10, b"ab!", LENGTH), now=101).text == "ab!"


def test_a_stop_token_that_completes_a_stop_string_by_its_text_does_not():
    given = answer(stop_strings=["b!"])
    assert given.push(run(10, b"ab!", STOP), now=101).text == "ab"
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
    # What the node sent before it heard of the end.
    assert given.push(run(14, b"ef"), now=103) is None
    assert given.token_ids == list(b"abcd")


@pytest.mark.parametrize("reason", [0, LENGTH])
def test_a_stop_string_is_found_in_the_middle_and_at_the_end_of_a_run(reason):
    given = answer(stop_strings=["b"])
    assert given.push(run(10, b"abb", reason), now=101).text == "a"
    assert given.token_ids == list(b"ab")
    last = answer(stop_strings=["b"])
    last.push(run(10, b"aab", reason), now=101)
    assert (last.finish.reason, last.finish.stop_string) == (STOP, "b")


def test_a_stop_string_of_characters_of_several_bytes_ends_with_the_last_of_them():
    given = answer(stop_strings=["é!"])
    assert given.push(run(10, "aé".encode()), now=101).text == "a"
    assert given.push(run(13, b"!?"), now=102).text == ""
    assert given.finish.stop_string == "é!"
    assert bytes(given.token_ids) == "aé!".encode()


@pytest.mark.parametrize(("reason", "text"), [(LENGTH, "the end"), (EOS, "the en")])
def test_text_that_was_held_back_for_a_stop_string_comes_with_the_end(reason, text):
    given = answer(stop_strings=["ends"])
    assert given.push(run(10, b"the en"), now=101).text == "the "
    assert "the " + given.push(run(16, b"d", reason), now=102).text == text
    assert given.finish.reason == reason


def test_a_stop_string_does_not_stop_before_min_tokens():
    given = answer(stop_strings=["b"], min_tokens=4)
    assert given.push(run(10, b"abab"), now=101).text == "aba"
    assert given.finish.stop_string == "b"


def test_a_stop_string_that_passed_by_before_min_tokens_does_not_stop_after_them():
    given = answer(stop_strings=["ab", "never"], min_tokens=3)
    assert given.push(run(10, b"abc"), now=101).text == "abc"
    assert given.push(run(13, b"d", LENGTH), now=102).text == "d"
    assert given.finish.reason == LENGTH


def test_an_answer_that_ends_before_min_tokens_has_its_whole_text():
    given = answer(stop_strings=["ends"], min_tokens=9)
    assert given.push(run(10, b"the end", LENGTH), now=101).text == "the end"


def test_logprobs_stay_with_their_tokens_when_some_are_skipped():
    given = answer()
    given.push(scored(10, b"ab"), now=101)
    delta = given.push(scored(10, b"abcd"), now=102)
    assert [one.chosen.token_id for one in delta.logprobs] == list(b"cd")
    # Some nodes' first token comes without, the same answer's next with.
    assert not given.push(run(14, b"e"), now=103).logprobs


def test_logprobs_of_tokens_after_a_stop_string_are_dropped_with_them():
    given = answer(stop_strings=["c"])
    given.push(scored(10, b"a"), now=101)
    delta = given.push(scored(10, b"abcd"), now=102)
    assert list(delta.token_ids) == list(b"bc")
    assert [one.chosen.token_id for one in delta.logprobs] == list(b"bc")


def test_a_stage_that_did_not_happen_is_not_in_the_timing():
    marks = Marks(arrived=100.0, paired=101.0)
    # Local or one token: nothing was reserved or sealed. A skipped token is no moment.
    given = answer(marks)
    given.push(run(10, b"a", LENGTH), now=104)
    given.push(run(10, b"a"), now=109)
    seconds = {name.name: value.ToSeconds() for name, value in marks.to_timing().ListFields()}
    assert seconds == {"queue": 1, "prefill": 3, "ttft": 4, "total": 4}


def test_the_first_token_of_any_choice_is_the_requests_first():
    marks = Marks(arrived=100.0)
    answers = [answer(marks, choice=choice) for choice in range(2)]
    answers[1].push(run(10, b"a"), now=103)
    answers[0].push(run(10, b"a"), now=104)
    answers[0].push(run(11, b"b"), now=106)
    assert (marks.first_token, marks.second_token, marks.last_token) == (103, 106, 106)
