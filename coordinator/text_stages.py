"""The decoders of tokenizer.json, as stages that work while tokens still arrive.

    token --stage--> tokens --stage--> ... --> text

tokenizers decodes a whole list at once; each stage here gives, over any split of that list, the
same text in all. A stage holds back only what a later token can still change: the first bytes of
a character, or (byte fallback) a run of byte tokens, because one bad byte turns the whole run into
replacement characters. The states belong to one choice; build_stages() makes new ones for each.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

# GPT-2's table: printable bytes stand for themselves, the others for code points from 256 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(_OTHERS)
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Stage(Protocol):
    """Takes tokens one by one and gives what follows from them; finish() gives what was held."""

    def push(self, token: str) -> list[str]: ...

    def finish(self) -> list[str]: ...


class EachToken:
    """A function of one token and of whether it is the first."""

    def __init__(self, function: Callable[[str, bool], str]) -> None:
        self._function = function
        self._is_first = True

    def push(self, token: str) -> list[str]:
        text = self._function(token, self._is_first)
        self._is_first = False
        return [text]

    def finish(self) -> list[str]:
        return []


class ByteLevel:
    """Tokens are bytes in GPT-2's alphabet; text is their UTF-8, bad bytes replaced."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> list[str]:
        try:
            data = bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token outside the alphabet is plain text
            data = token.encode()
        return [self._utf8.decode(data)]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class ByteFallback:
    """A run of <0x..> tokens is the text that their bytes spell, or U+FFFD for every byte."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> list[str]:
        if match := _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(match[1], 16))
            return []
        return [*self.finish(), token]

    def finish(self) -> list[str]:
        if not self._run:
            return []
        try:
            run = [self._run.decode()]
        except UnicodeDecodeError:
            run = ["\ufffd"] * len(self._run)
        self._run.clear()
        return run


class StripText:
    """Drops up to `count` leading characters of the whole text, where they are `char`."""

    def __init__(self, *, char: str, count: int) -> None:
        self._char = char
        self._left = count

    def push(self, token: str) -> list[str]:
        start = 0
        while self._left and start < len(token):
            if token[start] == self._char:
                start += 1
                self._left -= 1
            else:
                self._left = 0
        return [token[start:]]

    def finish(self) -> list[str]:
        return []


def build_stages(decoder: Mapping[str, Any] | None) -> list[Stage]:
    """New stages for the "decoder" object of a tokenizer.json.

    Raises ValueError for a decoder that no text generation model is known to use.
    """
    if decoder is None:
        return [EachToken(lambda token, is_first: token if is_first else " " + token)]
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages: list[Stage] = []
    # From then on tokens are pieces of one long token, and only what works on pieces may follow.
    is_fused = False
    for part in parts:
        match part:
            case {"type": "ByteLevel"} if not is_fused:
                stages.append(ByteLevel())
                is_fused = True
            case {"type": "ByteFallback"} if not is_fused:
                stages.append(ByteFallback())
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": char, "start": count, "stop": 0}:
                stages.append(
                    StripText(char=char, count=count) if is_fused else _strip_each(char, count)
                )
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not is_fused:
                stages.append(_replace_each(old, new))
            case {"type": "Metaspace", "replacement": char} if not is_fused:
                stages.append(_metaspace(char, part.get("prepend_scheme", "always") != "never"))
            case _:
                raise ValueError(f"tokenizer.json: decoder {part} cannot be streamed")
    return stages


def _strip_each(char: str, count: int) -> Stage:
    return EachToken(lambda token, _: StripText(char=char, count=count).push(token)[0])


def _replace_each(old: str, new: str) -> Stage:
    return EachToken(lambda token, _: token.replace(old, new))


def _metaspace(char: str, is_prepended: bool) -> Stage:
    return EachToken(
        lambda token, is_first: token.replace(char, "" if is_first and is_prepended else " ")
    )
