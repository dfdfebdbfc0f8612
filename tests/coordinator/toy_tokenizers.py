"""Small tokenizers of the kinds that models have, made in memory."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SMOLLM2 = Path.home() / ".cache/disagg/models/smollm2-135m"


def byte_level() -> Tokenizer:
    """GPT-2's kind: every byte is a token. Three special tokens, two added plain ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<|im_end|>"])
    # One is outside the byte alphabet, one looks as if it were inside.
    tokenizer.add_tokens(["日本", AddedToken("Ġx", normalized=False)])
    bos = ("<bos>", tokenizer.token_to_id("<bos>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[bos]
    )
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Llama 2's kind: pieces with a visible space, and <0x..> tokens for what has no piece."""
    tokenizer = _pieces(byte_tokens=True)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return tokenizer


def metaspace(*, prepend_scheme: str = "always") -> Tokenizer:
    """T5's kind: the first token loses its visible space."""
    tokenizer = _pieces(byte_tokens=False)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=prepend_scheme)
    return tokenizer


def without_decoder() -> Tokenizer:
    """Word-level toys: tokens are joined with spaces."""
    return _pieces(byte_tokens=False)


def _pieces(*, byte_tokens: bool) -> Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if byte_tokens else []
    words = ["a", "b", "ab", "é", "e", "\u0301", "😀", "�", "▁", "▁▁", "▁a", "▁�", " ", "<0x4>"]
    names = ["<unk>", "<s>", "</s>", *bytes_, *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[("a", "b")],
            unk_token="<unk>",
            byte_fallback=byte_tokens,
        )
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
