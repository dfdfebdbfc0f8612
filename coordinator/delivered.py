"""What a client has of an answer, so that the same request sent again goes on from there.

The same request with the same seed has the same tokens and text; only their split over messages
differs. Tokens are skipped by position, text by its length.
"""

from dataclasses import replace

from coordinator.events import Delta, PromptLogprobs


class Delivered:
    """Of one answer; begin() before each time that the request is sent."""

    def __init__(self) -> None:
        self._next_position: dict[int, int] = {}
        self._num_chars: dict[int, int] = {}
        self._num_scored = 0
        self._chars_now: dict[int, int] = {}

    def begin(self) -> None:
        self._chars_now = {}

    def new(self, event: Delta | PromptLogprobs) -> Delta | PromptLogprobs | None:
        """What of the event was not delivered yet; None if there is nothing."""
        if isinstance(event, PromptLogprobs):
            return self._new_scores(event)
        choice = event.choice
        skip = max(0, self._next_position.get(choice, event.position) - event.position)
        end = event.position + len(event.token_ids)
        self._next_position[choice] = max(end, self._next_position.get(choice, 0))
        before = self._chars_now.get(choice, 0)
        self._chars_now[choice] = before + len(event.text)
        had = self._num_chars.get(choice, 0)
        self._num_chars[choice] = max(had, self._chars_now[choice])
        text = event.text[max(0, had - before) :]
        if not text and skip >= len(event.token_ids):
            return None
        return replace(
            event,
            position=event.position + min(skip, len(event.token_ids)),
            token_ids=event.token_ids[skip:],
            logprobs=event.logprobs[skip:],
            text=text,
        )

    def _new_scores(self, event: PromptLogprobs) -> PromptLogprobs | None:
        skip = max(0, 1 + self._num_scored - event.position)
        tokens = event.tokens[skip:]
        self._num_scored += len(tokens)
        return replace(event, position=event.position + skip, tokens=tokens) if tokens else None
