"""Text to token ids and back, the model's own way; no node ever sees text.

    text -----------------------------> encode --> ids          (with the model's special tokens)
    messages --> chat template --> text --> encode --> ids      (the template wrote them already)
    ids --> Detokenizer --> text

From a model folder's tokenizer.json, through the tokenizers library, which is what transformers'
tokenizers run on; ids are the same.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from coordinator.chat_template import load_chat_template
from coordinator.detokenizer import Detokenizer, Vocabulary


class ModelTokenizer:
    """The tokenizer and chat template of one model folder.

    Raises ValueError when the folder has no tokenizer.json, or one that cannot be streamed.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file; a model folder needs its tokenizer")
        self._folder = folder
        self._tokenizer = Tokenizer.from_file(str(path))
        # Left in some files from training; a prompt is never cut or filled up silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocabulary = Vocabulary(self._tokenizer)
        self._chat_template = load_chat_template(folder)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may be padded beyond it."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text. Blocks the caller and holds the GIL, 1 s per some MB of text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As encode, on a worker thread. encode_batch, because only it releases the GIL."""
        (encoding,) = await asyncio.to_thread(
            self._tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a chat, up to where the assistant's answer begins.

        Raises ValueError when the model has no chat template, for no messages, for an unknown
        role, and for what the template itself refuses.
        """
        if self._chat_template is None:
            raise ValueError(f"{self._folder.name}: the model has no chat template")
        return self._chat_template.render(messages)

    async def encode_chat_async(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat. Raises ValueError as render_chat does."""
        text = await asyncio.to_thread(self.render_chat, messages)
        # The template has written the special tokens; the tokenizer would write them again.
        return await self.encode_async(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all of token_ids at once, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """A new incremental detokenizer, for one choice."""
        return Detokenizer(self._vocabulary)
