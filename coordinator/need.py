"""What a request takes of the nodes that serve it, as pairing sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtransfer.layout import KvLayout


def no_hashes(_: KvLayout) -> Sequence[int]:
    """Of a prompt that is computed whole, whatever is cached."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Tokens to prefill now, and of prompt and output together at most.

    num_choices are generated from one prefill; max_num_tokens is of each. block_hashes tells the
    hash chain of the prompt's full blocks as a node of that layout cuts them; it is empty where
    nothing cached may be used.
    """

    num_prompt_tokens: int
    max_num_tokens: int
    num_choices: int = 1
    block_hashes: Callable[[KvLayout], Sequence[int]] = field(default=no_hashes, compare=False)

    @property
    def num_tokens(self) -> int:
        """The prompt and the output of all choices, at most."""
        output = self.max_num_tokens - self.num_prompt_tokens
        return self.num_prompt_tokens + self.num_choices * output

    @property
    def is_one_token(self) -> bool:
        return self.num_choices == 1 and self.max_num_tokens == self.num_prompt_tokens + 1
