"""From a step's logits to its result: tokens drawn, log-probabilities where they are asked for.

    logits of the rows that draw | of the tokens that are scored, both in the order of rows
      draw -> token_ids; raw logits of those that ask -> logprobs | -> prompt_logprobs

The same end of a step for every executor that has logits. Runs on the engine thread.
Suffixes: B rows that draw, then tokens that are scored; V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

import torch

from engine.executor import Draw, PromptLogprobs, Row, StepResult, TokenLogprobs
from engine.logprobs import token_logprobs

DrawTokens = Callable[[torch.Tensor, Sequence[Draw]], list[int]]


def step_result(rows: Sequence[Row], logits_BV: torch.Tensor, *, draw: DrawTokens) -> StepResult:
    """draw may overwrite its logits. Raises ValueError where draw does and for a NaN."""
    draws = [row.draw for row in rows if row.draw is not None]
    num_draws = len(draws)
    asking = [index for index, drawn in enumerate(draws) if drawn.num_logprobs is not None]
    # A copy, taken before anything is banned in place.
    raw_BV = logits_BV[asking] if asking else logits_BV[:0]
    tokens = iter(draw(logits_BV[:num_draws], draws) if draws else ())
    token_ids = tuple(None if row.draw is None else next(tokens) for row in rows)
    has_scored = num_draws < len(logits_BV)
    return StepResult(
        token_ids=token_ids,
        logprobs=_logprobs(rows, token_ids, raw_BV) if asking else (),
        prompt_logprobs=_prompt_logprobs(rows, logits_BV[num_draws:]) if has_scored else (),
    )


def _logprobs(
    rows: Sequence[Row], token_ids: Sequence[int | None], raw_BV: torch.Tensor
) -> tuple[TokenLogprobs | None, ...]:
    counts = [None if row.draw is None else row.draw.num_logprobs for row in rows]
    asked = [
        (token_id, count)
        for token_id, count in zip(token_ids, counts, strict=True)
        if token_id is not None and count is not None
    ]
    scored = iter(
        token_logprobs(
            raw_BV,
            [token_id for token_id, _ in asked],
            num_top=[count for _, count in asked],
        )
    )
    return tuple(None if count is None else next(scored) for count in counts)


def _prompt_logprobs(
    rows: Sequence[Row], logits_BV: torch.Tensor
) -> tuple[PromptLogprobs | None, ...]:
    scorings = [row.scoring for row in rows if row.scoring is not None]
    scored = iter(
        token_logprobs(
            logits_BV,
            list(chain.from_iterable(scoring.token_ids for scoring in scorings)),
            num_top=list(
                chain.from_iterable([s.num_logprobs] * len(s.token_ids) for s in scorings)
            ),
        )
    )
    return tuple(_of_row(row, scored) for row in rows)


def _of_row(row: Row, scored: Iterable[TokenLogprobs]) -> PromptLogprobs | None:
    if row.scoring is None:
        return None
    tokens = tuple(islice(scored, len(row.scoring.token_ids)))
    return PromptLogprobs(position=row.start + 1, tokens=tokens)
