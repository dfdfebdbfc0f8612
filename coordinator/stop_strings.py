"""Stop strings in a text that is still arriving.

    push("...the en") -> "...the "      "en" could still become "end"
    push("d of it")   -> "", matched "end"

Text is held back only while it could be the beginning of a stop string. The match that is complete
first wins, and of those that end together the one that begins first: so the outcome is the text's,
however it was split, and nothing waits for a longer match.
"""

from collections.abc import Sequence


class StopStrings:
    """The search over one choice's text. matched is the stop string once there is one."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to be before any stop string; "" after a match."""
        if self.matched is not None:
            return ""
        # A match ends in the new text: what is complete in the held text was passed by.
        num_seen = len(self._held)
        text = self._held + text
        found = (
            (text.find(stop, max(0, num_seen + 1 - len(stop))), stop) for stop in self._stop_strings
        )
        _, start, matched = min(
            ((start + len(stop), start, stop) for start, stop in found if start >= 0),
            default=(0, 0, None),
        )
        if matched is not None:
            self.matched = matched
            self._held = ""
            return text[:start]
        num_held = self._longest_beginning(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def pass_by(self, text: str) -> str:
        """Like push where a stop string must not stop: what it completes is let through."""
        text, self._held = self._held + text, ""
        num_held = self._longest_beginning(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back: the text has ended, and it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of text that a stop string begins with, and goes on from."""
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop_strings):
                return length
        return 0
