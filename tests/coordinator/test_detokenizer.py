"""The detokenizer against the library's own decode, over any ids and any split."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from toy_tokenizers import SMOLLM2, byte_fallback, byte_level, metaspace, without_decoder
from transformers.convert_slow_tokenizer import bytes_to_unicode

from coordinator.detokenizer import Detokenizer, Vocabulary
from coordinator.text_stages import build_stages

TOYS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, no strip": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "metaspace, never": lambda: metaspace(prepend_scheme="never"),
    "no decoder": without_decoder,
}
# Characters whose bytes go wrong in every way: cut, overlong, surrogates, beyond the last plane.
BYTES = bytes([0x00, 0x20, 0x41, 0x7F, 0x80, 0xA0, 0xBD, 0xBF, 0xC0, 0xC3, 0xE0, 0xE4, 0xED, 0xEF])
BYTES += bytes([0xF0, 0x9F, 0x98, 0x80, 0xF4, 0x90, 0xF5, 0xFF])


def streamed(vocabulary: Vocabulary, pushes: Sequence[Sequence[int]]) -> str:
    detokenizer = Detokenizer(vocabulary)
    return "".join([detokenizer.push(ids) for ids in pushes]) + detokenizer.finish()


def texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each single token gives, and last what finish gives."""
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    return [*(detokenizer.push([i]) for i in ids), detokenizer.finish()]


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", TOYS)
@settings(deadline=None)
@given(data=st.data())
def test_texts_concatenate_to_the_whole_decode_for_any_ids_and_split(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOYS[name]()
    # Past the end too: a model's logits are padded, and decode() skips unknown ids.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    want = tokenizer.decode(ids, skip_special_tokens=True)
    assert streamed(Vocabulary(tokenizer), split(ids, cuts)) == want


@settings(deadline=None)
@given(data=st.lists(st.sampled_from(BYTES), max_size=12).map(bytes))
def test_broken_utf8_gives_the_replacement_characters_that_the_library_gives(data: bytes) -> None:
    byte_tokens = byte_level()
    chars = bytes_to_unicode()
    ids = [byte_tokens.token_to_id(chars[byte]) for byte in data]
    want = byte_tokens.decode(ids, skip_special_tokens=True)
    assert streamed(Vocabulary(byte_tokens), [[i] for i in ids]) == want
    fallback = byte_fallback()
    ids = [fallback.token_to_id(f"<0x{byte:02X}>") for byte in data]
    want = fallback.decode(ids, skip_special_tokens=True)
    assert streamed(Vocabulary(fallback), [[i] for i in ids]) == want


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_comes_back_from_its_bytes_and_no_part_of_a_character_is_given(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = texts(tokenizer, ids)
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


def test_an_emoji_is_given_with_its_last_token() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a😀b", add_special_tokens=False).ids
    assert texts(tokenizer, ids) == ["a", "", "", "", "😀", "b", ""]


def test_a_combining_mark_follows_its_letter() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("e\u0301", add_special_tokens=False).ids
    assert texts(tokenizer, ids) == ["e", "", "\u0301", ""]


def test_a_replacement_character_of_the_model_does_not_hold_back_what_follows() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("\ufffdb", add_special_tokens=False).ids
    assert texts(tokenizer, ids) == ["", "", "\ufffd", "b", ""]


def test_an_incomplete_tail_is_given_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("x😀", add_special_tokens=False).ids[:-1]
    assert texts(tokenizer, ids) == ["x", "", "", "", "\ufffd"]


def test_special_tokens_in_a_character_give_no_text_and_do_not_break_it() -> None:
    tokenizer = byte_level()
    first, second = tokenizer.encode("é", add_special_tokens=False).ids
    eos = tokenizer.token_to_id("<eos>")
    assert texts(tokenizer, [eos, first, eos, second]) == ["", "", "", "é", ""]


def test_a_run_of_byte_tokens_is_given_when_it_ends() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(token) for token in ("<0xC3>", "<0xA9>", "a")]
    assert texts(tokenizer, ids) == ["", "", "éa", ""]


def test_only_the_first_space_of_an_answer_is_stripped() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(token) for token in ("</s>", "▁", "▁a", "▁a")]
    assert texts(tokenizer, ids) == ["", "", " a", " a", ""]


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder()])
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: object) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    with pytest.raises(ValueError, match="cannot be streamed"):
        Vocabulary(tokenizer)


def test_nothing_that_needs_whole_tokens_may_follow_a_fuse() -> None:
    replace = {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}
    with pytest.raises(ValueError, match="cannot be streamed"):
        build_stages({"type": "Sequence", "decoders": [{"type": "Fuse"}, replace]})


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="the model is not there")
@settings(deadline=None)
@given(data=st.data())
def test_smollm2_texts_concatenate_to_the_whole_decode(data: st.DataObject) -> None:
    tokenizer, vocabulary = smollm2()
    some_ids = st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=60)
    ids_of_text = st.text().map(lambda text: tokenizer.encode(text).ids)
    ids = data.draw(st.one_of(some_ids, ids_of_text))
    cuts = data.draw(st.lists(st.integers(0, 60), max_size=10))
    want = tokenizer.decode(ids, skip_special_tokens=True)
    assert streamed(vocabulary, split(ids, cuts)) == want


def smollm2(cache: list[tuple[Tokenizer, Vocabulary]] = []) -> tuple[Tokenizer, Vocabulary]:  # noqa: B006
    if not cache:
        tokenizer = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
        cache.append((tokenizer, Vocabulary(tokenizer)))
    return cache[0]
