"""An answer that is sent again goes on where it was, however it is split now."""

import random

import pytest

from coordinator.delivered import Delivered
from coordinator.events import Delta, PromptLogprobs, TokenLogprobs

TEXT = "a\u00e9bcdefg"
# The text of each token: a character may take two.
PIECES = ["a", "", "\u00e9", "b", "c", "d", "e", "f", "g"]


def deltas(rng: random.Random) -> list[Delta]:
    """The same answer of 9 tokens after a prompt of 5, in messages of one to four tokens."""
    events, start = [], 0
    while start < len(PIECES):
        end = min(len(PIECES), start + rng.randrange(1, 5))
        events.append(
            Delta(
                choice=0,
                position=5 + start,
                token_ids=tuple(range(start, end)),
                text="".join(PIECES[start:end]),
                logprobs=tuple(
                    TokenLogprobs(token_id=i, logprob=-1.0, top=()) for i in range(start, end)
                ),
            )
        )
        start = end
    return events


@pytest.mark.parametrize("seed", range(50))
def test_each_token_and_character_comes_once(seed):
    rng = random.Random(seed)
    delivered, tokens, text, scored = Delivered(), [], "", []
    for is_last in (False, False, True):
        delivered.begin()
        events = deltas(rng)
        for event in events if is_last else events[: rng.randrange(len(events))]:
            new = delivered.new(event)
            if new is None:
                continue
            assert not new.token_ids or new.position == 5 + len(tokens)
            tokens += new.token_ids
            scored += [one.token_id for one in new.logprobs]
            text += new.text
    assert (tokens, text, scored) == (list(range(9)), TEXT, list(range(9)))


def test_prompt_logprobs_come_once():
    def scores(start: int, end: int) -> PromptLogprobs:
        tokens = tuple(TokenLogprobs(token_id=i, logprob=0.0, top=()) for i in range(start, end))
        return PromptLogprobs(position=start, tokens=tokens)

    delivered = Delivered()
    assert delivered.new(scores(1, 4)) == scores(1, 4)
    delivered.begin()
    assert delivered.new(scores(1, 3)) is None
    assert delivered.new(scores(3, 6)) == scores(4, 6)
