"""What the requests of a workload say: token ids made up from a seed, other ones in every request.

Nothing a server has seen before comes again, so no prefix cache answers, but for the blocks that a
trace says are shared: equal ids have equal tokens. Another run against the same server needs
another seed.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.workload import Arrival, Workload

# Ordinary tokens of SmolLM2, and of most vocabularies that are as large.
VOCAB = range(1000, 49_000)
# Every seed gives two kinds of streams.
_OWN, _SHARED = 0, 1

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """An arrival, ready to be sent."""

    arrival: Arrival
    prompt: Prompt


def with_prompts(workload: Workload, *, seed: int, vocab: range = VOCAB) -> list[Prompted]:
    """Made before a run's clock starts, so that making them makes nothing late."""
    prompts = Prompts(seed=seed, vocab=vocab)
    return [
        Prompted(arrival=arrival, prompt=prompts.of(index, arrival))
        for index, arrival in enumerate(workload.arrivals)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompt of every request of a run; vocab is what ids are drawn from."""

    seed: int
    vocab: range = VOCAB

    def of(self, index: int, arrival: Arrival) -> Prompt:
        """num_input token ids of the index-th request, or its text."""
        if arrival.text is not None:
            return arrival.text
        token_ids = array("I")
        for block_id in arrival.block_ids:
            if len(token_ids) >= arrival.num_input:
                break
            token_ids += self._draw(_SHARED, block_id, arrival.block_tokens)
        del token_ids[arrival.num_input :]
        return token_ids + self._draw(_OWN, index, arrival.num_input - len(token_ids))

    def _draw(self, kind: int, number: int, num_tokens: int) -> "array[int]":
        rng = np.random.default_rng([self.seed, kind, number])
        drawn = rng.integers(self.vocab.start, self.vocab.stop, size=num_tokens, dtype=np.uint32)
        return array("I", drawn.tobytes())


def ordinary_tokens(vocab_size: int) -> range:
    """Without both ends of a vocabulary, where special tokens are."""
    margin = vocab_size // 48
    return range(margin, vocab_size - margin)
