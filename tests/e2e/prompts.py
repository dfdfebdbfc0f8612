"""Prompts of the master test: lengths at block and chunk edges, and text of many kinds."""

from tokenizers import Tokenizer

BLOCK_SIZE = 16

_STORY = (
    "The old lighthouse keeper climbed the stairs every evening, counting each step under his "
    "breath. On the night of the great storm he reached one hundred and thirteen, and found that "
    "somebody had left a letter on the last of them. "
)
_TEXTS = (
    "Why is the sky blue?",
    "Der Fluss führt im Frühling so viel Wasser, dass die Straße überschwemmt ist. Deshalb",
    "Les élèves ont préparé un gâteau à la crème pour l'anniversaire de leur maîtresse, et",
    "今日はとても天気が良いので、公園まで散歩に行きました。そこで",
    "Москва — столица России, а Париж —",
    "السماء زرقاء لأن",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    'SELECT name, COUNT(*) AS n FROM orders\nWHERE total > 100.50 AND city = "Köln"\nGROUP BY',
    "#include <vector>\nint main() {\n\tstd::vector<int> v{1, 2, 3};\n\tfor (auto x : v) {\n\t\t",
    "🎉🎂 Happy birthday! 🥳 Let's list some emojis: 😀 😃 😄 👩‍👩‍👧‍👦 🇫🇷",
    "e\u0301 n\u0303 a\u030a (combining marks) and a zero-width joiner: \u200d.",
    "1234567890 + 9876543210 = 11111111100. And 3.14159 * 2 =",
    "   leading spaces,\ttabs\t\tand\n\n\nnewlines   ",
)
# 1, block size -1/0/+1, two blocks, odd ones, several chunks.
_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 123, 256, 511, 777)


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """25 prompts as token ids: 13 of text, 12 of fixed length."""
    story = tokenizer.encode(_STORY * 40, add_special_tokens=False).ids
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in _TEXTS]
    prompts += [story[start : start + n] for start, n in enumerate(_LENGTHS)]
    assert [len(prompt) for prompt in prompts[-len(_LENGTHS) :]] == list(_LENGTHS)
    return prompts
