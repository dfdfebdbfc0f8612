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
class Draw:
    """How a row's next token is drawn: a pure function of logits and this.

    position is the absolute position of the token to draw. banned_token_ids are never drawn.
    """

    sampling: SamplingParams
    seed: int
    choice: int
    position: int
    banned_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence's share of a step: token_ids sit at positions start, start + 1, ...

    block_table covers positions 0 to start + len(token_ids); KV of positions before start is in
    it already. draw is None where nothing is sampled (a chunk that does not end the prompt).
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    draw: Draw | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """token_ids[i] is what row i drew, None where it drew nothing."""

    token_ids: tuple[int | None, ...]


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
