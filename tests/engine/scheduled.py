"""Requests through a scheduler and an executor, step by step: a node without its servers.

    progress = run_specs(executor, [spec, ...], chunk=7)

A chunk has about so many tokens: every token costs 1 ms, so a step's budget is its number of
tokens. What comes back is a list of Progress per spec, in order.
"""

import itertools
from collections.abc import Sequence

from engine.cost_model import CostProfile
from engine.executor import Executor, TokenLogprobs
from engine.scheduler import PROMPT_BUDGETS, Progress, Running, Scheduler
from engine.sequence import GenerationSpec

PER_TOKEN = CostProfile(
    base_ms=0,
    decode_row_ms=1,
    prefill_token_ms=1,
    decode_context_ms=0,
    prefill_context_ms=0,
)


def run_specs(
    executor: Executor, specs: Sequence[GenerationSpec], *, chunk: int = 1000
) -> list[list[Progress]]:
    """All of them together, in disjoint blocks from the first on, until each has ended."""
    block_size = executor.layout.block_size
    scheduler = Scheduler(
        PER_TOKEN,
        step_budget_ms=chunk / PROMPT_BUDGETS,
        block_size=block_size,
        eos_token_ids=executor.eos_token_ids,
    )
    blocks = itertools.count()
    for key, spec in enumerate(specs):
        num_blocks = -(-(spec.max_num_tokens + 1) // block_size)
        scheduler.add(
            Running(
                key=key,
                spec=spec,
                block_table=list(itertools.islice(blocks, num_blocks)),
                token_ids=list(spec.token_ids),
                num_computed=0,
                max_new_tokens=spec.stop.max_tokens,
            )
        )
    progress: list[list[Progress]] = [[] for _ in specs]
    while (step := scheduler.plan()) is not None:
        for event in scheduler.apply(step, executor.execute(step.plan)):
            progress[event.key].append(event)
    return progress


def tokens_of(progress: Sequence[Progress]) -> list[int]:
    return [event.token_id for event in progress if event.token_id is not None]


def logprobs_of(progress: Sequence[Progress]) -> list[TokenLogprobs]:
    return [event.logprobs for event in progress if event.logprobs is not None]


def prompt_logprobs_of(progress: Sequence[Progress]) -> list[TokenLogprobs]:
    """Of the prompt's tokens from the second on; the runs must follow each other without a gap."""
    tokens: list[TokenLogprobs] = []
    for event in progress:
        if event.prompt_logprobs is not None:
            assert event.prompt_logprobs.position == 1 + len(tokens)
            tokens += event.prompt_logprobs.tokens
    return tokens
