"""The seam between deciding a step and computing it.

    Scheduler --StepPlan--> Executor --StepResult--> Scheduler

Two implementations: engine/torch_executor.py runs a model, engine/emulated_executor.py lasts as
long as a cost profile says. Both run on the engine thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import SamplingParams
from kvtransfer.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The tokens before a draw, prompt first: what its penalties look at.

    token_ids may be a running sequence's own list, which does not change during a step.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How a row's next token is drawn: a pure function of logits and this.

    position is the absolute position of the token to draw. banned_token_ids are never drawn.
    history is there if and only if sampling has penalties. num_logprobs is how many alternatives
    to report besides the drawn token; None: no log-probabilities.
    """

    sampling: SamplingParams
    seed: int
    choice: int
    position: int
    banned_token_ids: frozenset[int] = frozenset()
    history: History | None = None
    num_logprobs: int | None = None

    @property
    def is_adjusted(self) -> bool:
        """Whether it draws from other logits than the model's, bans aside."""
        return self.history is not None or bool(self.sampling.logit_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Tokens to tell the log-probabilities of: token_ids[i] is the one after the row's token i.

    num_logprobs is how many alternatives to report at each.
    """

    token_ids: Sequence[int]
    num_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence's share of a step: token_ids sit at positions start, start + 1, ...

    block_table covers positions 0 to start + len(token_ids); KV of positions before start is in
    it already. draw is None where nothing is sampled (a chunk that does not end the prompt).
    A token is scored or drawn after, not both: with a draw, scoring leaves out the last token.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    draw: Draw | None
    scoring: Scoring | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Of one position: the log-probability of the token there, and of the most likely ones.

    Natural logarithms under the model's own logits: before bias, penalties, bans, temperature and
    filters, so they compare between requests. top is (token id, log-probability), the most
    likely first, then the lowest id; the token itself is in it only if it is one of them.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Of consecutive prompt tokens, the first of which is at position."""

    position: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """token_ids[i] is what row i drew, None where it drew nothing.

    logprobs[i] belongs to that token, prompt_logprobs[i] to what row i scored; None where nobody
    asked, and an empty tuple if no row did.
    """

    token_ids: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()


class Executor(Protocol):
    """Computes steps over the KV memory that it was given; knows nothing of requests."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Writes the KV of every row's tokens into its blocks and draws where asked."""
        ...
