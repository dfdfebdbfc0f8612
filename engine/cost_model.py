"""How long a step takes: a linear model over what the step computes, in milliseconds.

    ms = base + decode rows * a + prefill tokens * b + decode context * c + prefill context * d

Context is counted in attended positions: a decode row at position p attends p + 1, a chunk of n
tokens from position s attends n * s + n * (n + 1) / 2. Pure: the scheduler, the emulated executor
and a simulator share it. engine/calibration.py measures a profile.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step computes, as far as its time goes."""

    num_decode_rows: int = 0
    num_prefill_tokens: int = 0
    decode_context: int = 0
    prefill_context: int = 0

    def __add__(self, other: "StepShape") -> "StepShape":
        return StepShape(
            num_decode_rows=self.num_decode_rows + other.num_decode_rows,
            num_prefill_tokens=self.num_prefill_tokens + other.num_prefill_tokens,
            decode_context=self.decode_context + other.decode_context,
            prefill_context=self.prefill_context + other.prefill_context,
        )


def decode_shape(position: int) -> StepShape:
    """One decode row whose token sits at position."""
    return StepShape(num_decode_rows=1, decode_context=position + 1)


def chunk_shape(start: int, num_tokens: int) -> StepShape:
    """A prefill chunk of num_tokens from position start."""
    attended = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return StepShape(num_prefill_tokens=num_tokens, prefill_context=attended)


def row_shape(start: int, num_tokens: int) -> StepShape:
    """A row of either kind: one token at a position above 0 costs what a decode row costs."""
    if num_tokens == 1 and start > 0:
        return decode_shape(start)
    return chunk_shape(start, num_tokens)


def total(shapes: Iterable[StepShape]) -> StepShape:
    return sum(shapes, StepShape())


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Coefficients of the model, in milliseconds; none is negative."""

    base_ms: float
    decode_row_ms: float
    prefill_token_ms: float
    decode_context_ms: float
    prefill_context_ms: float

    def predict_ms(self, shape: StepShape) -> float:
        """Predicted duration of a step."""
        return (
            self.base_ms
            + shape.num_decode_rows * self.decode_row_ms
            + shape.num_prefill_tokens * self.prefill_token_ms
            + shape.decode_context * self.decode_context_ms
            + shape.prefill_context * self.prefill_context_ms
        )

    def chunk_ms(self, *, start: int, num_tokens: int) -> float:
        """What a prompt chunk of num_tokens from position start adds to a step."""
        attended = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.prefill_token_ms + attended * self.prefill_context_ms

    def largest_chunk(
        self, *, start: int, remaining: int, block_size: int, so_far: StepShape, budget_ms: float
    ) -> int:
        """Most prompt tokens from start that fit a step of budget_ms beside so_far.

        The chunk ends on a block edge or at the prompt's end; 0 if not even that much fits.
        """
        best = 0
        low, high = start // block_size + 1, -(-(start + remaining) // block_size)
        while low <= high:
            edge = (low + high) // 2
            num_tokens = min(edge * block_size - start, remaining)
            if self.predict_ms(so_far + chunk_shape(start, num_tokens)) <= budget_ms:
                best, low = num_tokens, edge + 1
            else:
                high = edge - 1
        return best
