"""Token ids to text while the tokens arrive.

    push([id, ...]) --> text that is certain now        finish() --> what is left

The texts of one choice concatenate to exactly what tokenizer.decode(ids, skip_special_tokens=True)
gives for all its ids, however they are split over the pushes. A character is given when its last
byte is there, never before, and nothing is decoded twice. tokenizers' own DecodeStream is not
used: it never gives an incomplete tail, holds everything back after a U+FFFD that the model wrote,
and raises on some byte-fallback runs.
"""

import json
from collections.abc import Iterable

from tokenizers import Tokenizer

from coordinator.text_stages import Stage, build_stages


class Vocabulary:
    """What detokenizers of one model share: token strings, and which of them are not text.

    Raises ValueError when the model's decoder cannot be streamed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = json.loads(tokenizer.to_str())["decoder"]
        build_stages(self._decoder)
        # By content, as decode() does: another id with a special token's content is skipped too.
        self._special_tokens = {
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special
        }
        self._tokens: dict[int, str | None] = {}

    def token(self, token_id: int) -> str | None:
        """The token's string; None for a special token or an id outside the vocabulary."""
        if token_id not in self._tokens:
            token = self._tokenizer.id_to_token(token_id)
            self._tokens[token_id] = None if token in self._special_tokens else token
        return self._tokens[token_id]

    def stages(self) -> list[Stage]:
        """The model's decoder with a fresh state."""
        return build_stages(self._decoder)


class Detokenizer:
    """The text of one choice. Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._stages = vocabulary.stages()

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is incomplete."""
        found = (self._vocabulary.token(token_id) for token_id in token_ids)
        tokens = [token for token in found if token is not None]
        for stage in self._stages:
            tokens = [text for token in tokens for text in stage.push(token)]
        return "".join(tokens)

    def finish(self) -> str:
        """The text that was held back. Nothing may be pushed after it."""
        tokens: list[str] = []
        for stage in self._stages:
            tokens = [text for token in tokens for text in stage.push(token)]
            tokens += stage.finish()
        return "".join(tokens)
