"""How a scheduler cuts prompts whose tokens are scored, and what it passes on; by hand."""

import pytest

from engine.executor import PromptLogprobs, Scoring, StepResult, TokenLogprobs
from engine.scheduler import MAX_SCORED_TOKENS, PROMPT_BUDGETS, Running, Scheduler
from engine.sequence import GenerationSpec, SamplingParams, StopConditions
from tests.engine.scheduled import PER_TOKEN


def make_scheduler(*, budget_ms: float = 10_000, block_size: int = 4) -> Scheduler:
    return Scheduler(PER_TOKEN, step_budget_ms=budget_ms / PROMPT_BUDGETS, block_size=block_size)


def running(
    key: int,
    num_prompt: int,
    *,
    output: tuple[int, ...] = (),
    num_top: int | None = 2,
    **sampling: float,
) -> Running:
    """A prompt of ids from 100 on."""
    token_ids = (*range(100, 100 + num_prompt), *output)
    spec = GenerationSpec(
        request_id=str(key),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        stop=StopConditions(max_tokens=9),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        num_logprobs=num_top,
        num_prompt_logprobs=num_top,
    )
    return Running(
        key=key,
        spec=spec,
        block_table=list(range(len(token_ids) + 10)),
        token_ids=list(token_ids),
        num_computed=0,
        max_new_tokens=9,
    )


def spans(scheduler: Scheduler) -> dict[int, tuple[int, int]]:
    """The step's (start, end) by key, after which nothing was drawn but 7s."""
    step = scheduler.plan()
    assert step is not None
    rows = step.plan.rows
    tokens = tuple(None if row.draw is None else 7 for row in rows)
    scheduler.apply(step, StepResult(token_ids=tokens))
    return {
        key: (row.start, row.start + len(row.token_ids))
        for key, row in zip(step.keys, rows, strict=True)
    }


def test_each_chunk_scores_the_tokens_after_its_own_up_to_the_prompts_end() -> None:
    scheduler = make_scheduler(budget_ms=8)
    scheduler.add(running(1, 10, output=(7, 8)))
    scorings = []
    for _ in range(3):
        step = scheduler.plan()
        assert step is not None
        (row,) = step.plan.rows
        scorings.append((row.start, row.scoring, row.draw is not None))
        drawn = None if row.draw is None else 9
        scheduler.apply(step, StepResult(token_ids=(drawn,)))
    assert scorings == [
        (0, Scoring(token_ids=list(range(101, 109)), num_logprobs=2), False),
        # Token 109 is the prompt's last; what follows was generated.
        (8, Scoring(token_ids=[109], num_logprobs=2), True),
        (12, None, True),
    ]


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    scheduler = make_scheduler()
    scheduler.add(running(1, 1))
    step = scheduler.plan()
    assert step is not None
    assert step.plan.rows[0].scoring is None


@pytest.mark.parametrize(
    ("block_size", "ends"),
    [(16, [256, 512, 600]), (100, [200, 400, 600]), (256, [256, 512, 600]), (300, [300, 600])],
)
def test_a_step_scores_few_tokens_and_ends_on_a_block_edge(
    block_size: int, ends: list[int]
) -> None:
    assert MAX_SCORED_TOKENS == 256
    scheduler = make_scheduler(block_size=block_size)
    scheduler.add(running(1, 600))
    assert [spans(scheduler)[1][1] for _ in ends] == ends


def test_scored_prompts_share_the_limit_and_others_pass_them() -> None:
    scheduler = make_scheduler()
    scheduler.add(running(1, 250))
    scheduler.add(running(2, 250))
    scheduler.add(running(3, 251))
    scheduler.add(running(4, 300, num_top=None))
    # 6 are left after the first: one block of the second; none of the third.
    assert spans(scheduler) == {1: (0, 250), 2: (0, 4), 4: (0, 300)}


def test_what_a_step_tells_reaches_the_sequence() -> None:
    scheduler = make_scheduler(budget_ms=4)
    scheduler.add(running(1, 6))
    chosen = TokenLogprobs(chosen=-0.5, top=((7, -0.5), (8, -1.0)))
    scored = PromptLogprobs(position=1, tokens=(chosen,) * 4)
    step = scheduler.plan()
    assert step is not None
    (first,) = scheduler.apply(step, StepResult(token_ids=(None,), prompt_logprobs=(scored,)))
    assert (first.token_id, first.logprobs, first.prompt_logprobs) == (None, None, scored)
    step = scheduler.plan()
    assert step is not None
    assert step.plan.rows[0].draw is not None
    assert step.plan.rows[0].draw.num_logprobs == 2
    rest = PromptLogprobs(position=5, tokens=(chosen,))
    (second,) = scheduler.apply(
        step, StepResult(token_ids=(7,), logprobs=(chosen,), prompt_logprobs=(rest,))
    )
    assert (second.token_id, second.logprobs, second.prompt_logprobs) == (7, chosen, rest)


def test_a_draw_has_its_history_only_when_a_penalty_looks_at_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(running(1, 2, output=(5,), presence_penalty=0.5))
    scheduler.add(running(2, 3))
    step = scheduler.plan()
    assert step is not None
    by_key = dict(zip(step.keys, (row.draw for row in step.plan.rows), strict=True))
    penalized, plain = by_key[1], by_key[2]
    assert penalized is not None and plain is not None and penalized.history is not None
    assert list(penalized.history.token_ids) == [100, 101, 5]
    assert penalized.history.num_prompt_tokens == 2
    assert plain.history is None
    assert (penalized.is_adjusted, plain.is_adjusted) == (True, False)
