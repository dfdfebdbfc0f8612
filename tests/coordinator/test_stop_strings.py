"""Stop strings in a text that arrives in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.stop_strings import StopStrings


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    search = StopStrings(stops)
    text = "".join(search.push(piece) for piece in pieces)
    return (text if search.matched else text + search.finish()), search.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["end"], ["the ", "en", "d of it"], "the ", "end"),
        (["end"], ["the en", "ergy"], "the energy", None),
        (["abc", "ab"], ["xab"], "x", "ab"),
        (["b", "abc"], ["abc"], "", "abc"),
        (["ab", "abc"], ["abc"], "", "ab"),
        (["é"], ["caf", "é!"], "caf", "é"),
        (["aab"], ["aa", "ab"], "a", "aab"),
        ([], ["any", "thing"], "anything", None),
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


def test_a_stop_string_that_is_passed_by_is_delivered():
    search = StopStrings(["end"])
    assert search.pass_by("the en") == "the "
    assert search.pass_by("d, and en") == "end, and "
    assert search.push("d") == ""
    assert search.matched == "end"


ALPHABET = st.text("ab", max_size=12)


@given(st.lists(ALPHABET, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_any_split_of_a_text_gives_what_the_whole_text_does(pieces, stops):
    whole = "".join(pieces)
    search = StopStrings(stops)
    for length in range(len(whole) + 1):
        # The first stop string to be complete ends the text, as characters come one by one.
        found = [(whole[:length].find(s), i) for i, s in enumerate(stops)]
        found = [(at, i) for at, i in found if at >= 0]
        if found:
            break
    one_by_one = feed(stops, list(whole))
    if found:
        at, index = min(found)
        assert one_by_one == (whole[:at], stops[index])
    else:
        assert one_by_one == (whole, None)
    text, matched = feed(stops, pieces)
    if matched is None:
        assert text == whole
    else:
        assert whole.startswith(text + matched)
    assert search.matched is None
