"""Stop strings in a text that arrives in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.stop_strings import StopStrings


def feed(
    stops: list[str], pieces: list[str], *, passed: list[str] | None = None
) -> tuple[str, str | None]:
    """The text that is delivered of passed and then pieces, and what matched."""
    search = StopStrings(stops)
    text = "".join(search.pass_by(piece) for piece in passed or [])
    text += "".join(search.push(piece) for piece in pieces)
    return (text if search.matched else text + search.finish()), search.matched


def of_whole_text(stops: list[str], text: str, *, num_passed: int = 0) -> tuple[str, str | None]:
    """The same by definition: the shortest text in which a stop string ends after num_passed."""
    for end in range(num_passed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["end"], ["the ", "en", "d of it"], "the ", "end"),
        (["end"], ["the en", "ergy"], "the energy", None),
        # Complete first, in whatever order they are named.
        (["ab", "abc"], ["abc"], "", "ab"),
        (["abc", "ab"], ["abc"], "", "ab"),
        (["abc", "ab"], ["a", "bc"], "", "ab"),
        (["b", "abc"], ["abc"], "a", "b"),
        (["b", "abc"], ["a", "b", "c"], "a", "b"),
        # Complete at the same character: the one that begins first.
        (["c", "abc"], ["abc"], "", "abc"),
        (["abc", "c"], ["a", "b", "c"], "", "abc"),
        # The beginning that fails holds another one.
        (["aab"], ["aa", "ab"], "a", "aab"),
        (["abab", "bc"], ["aba", "bc"], "", "abab"),
        (["abad", "bc"], ["ab", "abc"], "aba", "bc"),
        # Characters, however many bytes or code points.
        (["é"], ["caf", "é!"], "caf", "é"),
        (["😀😀"], ["x😀", "y😀", "😀"], "x😀y", "😀😀"),
        (["e\u0301"], ["e", "\u0301"], "", "e\u0301"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        ([], ["any", "thing"], "anything", None),
        (["end"], [], "", None),
    ],
)
def test_text_before_the_stop_is_delivered_and_nothing_else(stops, pieces, text, matched):
    assert feed(stops, pieces) == (text, matched)


def test_what_may_become_a_stop_string_is_held_back():
    search = StopStrings(["end"])
    assert search.push("the e") == "the "
    assert search.push("n") == ""
    assert search.push("d") == ""
    assert search.matched == "end"
    assert search.push("more") == ""
    assert search.finish() == ""


def test_no_more_is_held_back_than_could_become_a_stop_string():
    search = StopStrings(["abcd", "x"])
    assert search.push("abc") == ""
    assert search.push("abc") == "abc"
    assert search.push("!") == "abc!"
    assert search.finish() == ""


def test_what_was_held_back_is_released_at_the_end_once():
    search = StopStrings(["end"])
    assert search.push("the en") == "the "
    assert search.finish() == "en"
    assert search.finish() == ""
    assert search.matched is None


def test_a_stop_string_that_is_passed_by_is_delivered():
    search = StopStrings(["end"])
    assert search.pass_by("the en") == "the "
    assert search.pass_by("d, and en") == "end, and "
    assert search.push("d") == ""
    assert search.matched == "end"


@pytest.mark.parametrize(
    ("stops", "passed", "pieces", "text", "matched"),
    [
        # Complete before it may stop: it does not stop later either.
        (["ab", "xyz"], ["ab"], ["c"], "abc", None),
        (["ab", "abx"], ["ab"], ["c"], "abc", None),
        # What goes on from it may.
        (["ab", "abx"], ["ab"], ["x"], "", "abx"),
        (["aa"], ["aa"], ["a"], "a", "aa"),
        (["ab"], ["a"], ["b"], "", "ab"),
        (["ab"], ["ab"], ["ab"], "ab", "ab"),
    ],
)
def test_only_what_is_complete_after_it_may_stop_does(stops, passed, pieces, text, matched):
    assert feed(stops, pieces, passed=passed) == (text, matched)


# Few letters, so that beginnings and ends overlap; one takes two bytes, one four.
PIECES = st.lists(st.text("abé😀", max_size=5), max_size=8)
STOPS = st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=4)


@given(passed=PIECES, pieces=PIECES, stops=STOPS)
def test_any_split_of_a_text_gives_what_the_whole_text_does(passed, pieces, stops):
    whole, num_passed = "".join(passed + pieces), len("".join(passed))
    expected = of_whole_text(stops, whole, num_passed=num_passed)
    assert feed(stops, pieces, passed=passed) == expected


@given(pieces=PIECES, stops=STOPS)
def test_nothing_is_delivered_that_a_stop_string_could_begin_with(pieces, stops):
    search = StopStrings(stops)
    pushed = delivered = ""
    for piece in pieces:
        pushed += piece
        delivered += search.push(piece)
        if search.matched is not None:
            break
        held = pushed[len(delivered) :]
        assert delivered + held == pushed
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
