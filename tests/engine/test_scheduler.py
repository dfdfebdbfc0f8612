"""The scheduler, with costs that make every step computable by hand: 1 ms per token, no more."""

from dataclasses import replace

import pytest

from engine.cost_model import CostProfile, chunk_shape, decode_shape, row_shape
from engine.executor import StepResult
from engine.scheduler import PROMPT_BUDGETS, Running, Scheduler
from engine.sequence import GenerationSpec, StopConditions, finish_reason

PER_TOKEN = CostProfile(
    base_ms=0,
    decode_row_ms=1,
    prefill_token_ms=1,
    decode_context_ms=0,
    prefill_context_ms=0,
)
EOS = frozenset({99})


def scheduler(*, budget_ms: float = 8) -> Scheduler:
    """budget_ms is that of a step of prompts alone."""
    step_budget_ms = budget_ms / PROMPT_BUDGETS
    return Scheduler(PER_TOKEN, step_budget_ms=step_budget_ms, block_size=4, eos_token_ids=EOS)


def running(
    key: int, num_prompt: int, *, max_tokens: int = 5, max_new: int | None = None, **stop: object
) -> Running:
    spec = GenerationSpec(
        request_id=str(key),
        token_ids=tuple(range(num_prompt)),
        num_prompt_tokens=num_prompt,
        stop=StopConditions(max_tokens=max_tokens, **stop),
    )
    return Running(
        key=key,
        spec=spec,
        block_table=list(range(-(-(num_prompt + max_tokens) // 4))),
        token_ids=list(spec.token_ids),
        num_computed=0,
        max_new_tokens=max_new or max_tokens,
    )


def step(schedule: Scheduler, *tokens: int | None):
    """Runs a step in which row i draws tokens[i], if it draws. Returns spans by key, progress."""
    planned = schedule.plan()
    assert planned is not None
    rows = planned.plan.rows
    drawn = tuple(
        token if row.draw is not None else None
        for row, token in zip(rows, tokens or (7,) * len(rows), strict=True)
    )
    spans = {
        key: (row.start, row.start + len(row.token_ids))
        for key, row in zip(planned.keys, rows, strict=True)
    }
    return spans, schedule.apply(planned, StepResult(token_ids=drawn))


def test_a_prompt_is_cut_at_block_edges_that_fit_the_budget():
    schedule = scheduler(budget_ms=10)
    schedule.add(running(1, 18))
    assert step(schedule)[0] == {1: (0, 8)}
    assert step(schedule)[0] == {1: (8, 18)}
    assert step(schedule)[0] == {1: (18, 19)}


def test_a_prompt_that_fits_is_computed_whole_and_draws():
    schedule = scheduler()
    schedule.add(running(1, 7))
    spans, (progress,) = step(schedule, 42)
    assert spans == {1: (0, 7)}
    assert (progress.token_id, progress.position, progress.num_computed) == (42, 7, 7)


def test_decode_rows_go_first_and_a_prompt_gets_at_least_a_block():
    schedule = scheduler(budget_ms=3)
    for key in (1, 2, 3, 4):
        schedule.add(running(key, 1, max_tokens=50))
        step(schedule, *([7] * key))
    schedule.add(running(5, 100))
    # Four decode rows are over the budget already.
    spans = [step(schedule)[0] for _ in range(2)]
    assert [list(span) for span in spans] == [[1, 2, 3, 4, 5]] * 2
    assert [span[5] for span in spans] == [(0, 4), (4, 8)]


def test_prompts_share_a_step_the_shortest_first():
    schedule = scheduler(budget_ms=12)
    schedule.add(running(1, 5))
    schedule.add(running(2, 9))
    schedule.add(running(3, 4))
    # 4 of the third, 5 of the first: 3 more fit no whole block of the second.
    assert step(schedule)[0] == {3: (0, 4), 1: (0, 5)}


def test_a_short_prompt_passes_a_long_one_that_has_begun():
    schedule = scheduler(budget_ms=8)
    schedule.add(running(1, 40))
    assert step(schedule)[0] == {1: (0, 8)}
    schedule.add(running(2, 6))
    assert step(schedule)[0] == {2: (0, 6)}


def test_a_long_prompt_is_passed_no_longer_than_it_computes():
    """1 ms per token: 40 ms of prompt, and short ones without end, 8 ms every step."""
    schedule = scheduler(budget_ms=8)
    schedule.add(running(1, 40))
    waited_ms = 0
    for key in range(2, 20):
        schedule.add(running(key, 8, max_new=1))
        spans, _ = step(schedule)
        if 1 in spans:
            break
        waited_ms += 8
    # After 32 ms it has 8 left to go before it counts as the shortest, and is first by age.
    assert waited_ms == 32


def test_a_higher_priority_goes_before_a_shorter_prompt():
    schedule = scheduler(budget_ms=8)
    urgent = running(2, 8)
    urgent.spec = replace(urgent.spec, priority=1)
    schedule.add(running(1, 4))
    schedule.add(urgent)
    assert step(schedule)[0] == {2: (0, 8)}


def test_a_sequence_without_a_place_for_its_next_token_waits_for_a_block():
    schedule = scheduler()
    sequence = running(1, 4, max_tokens=20)
    sequence.block_table = [0, 1]
    schedule.add(sequence)
    for _ in range(5):
        step(schedule)
    assert len(sequence.token_ids) == 9
    assert schedule.in_need_of_blocks() == [sequence]
    assert schedule.plan() is None
    sequence.block_table.append(2)
    assert schedule.in_need_of_blocks() == []
    assert step(schedule)[0] == {1: (8, 9)}


def test_the_victim_is_the_youngest_of_the_lowest_priority_and_never_the_only_one():
    schedule = scheduler()
    first, second, urgent = running(1, 4), running(2, 4), running(3, 4)
    first.arrived_s, second.arrived_s, urgent.arrived_s = 1.0, 2.0, 3.0
    urgent.spec = replace(urgent.spec, priority=1)
    schedule.add(urgent)
    assert schedule.victim() is None
    for sequence in (second, first):
        schedule.add(sequence)
    assert schedule.victim() is second
    schedule.remove(2)
    assert schedule.victim() is first


def test_a_limit_of_new_tokens_ends_a_sequence_that_is_not_finished():
    schedule = scheduler()
    schedule.add(running(1, 3, max_new=1))
    _, (progress,) = step(schedule, 42)
    assert progress.left
    assert progress.reason == ""
    assert len(schedule) == 0


@pytest.mark.parametrize(
    ("tokens", "stop", "reason"),
    [
        ([99], {}, "eos"),
        ([99, 1, 2, 3, 4], {"ignore_eos": True}, "length"),
        ([5, 42], {"stop_token_ids": frozenset({42})}, "stop"),
        ([5, 99], {"stop_token_ids": frozenset({99})}, "stop"),
        ([1, 2, 3, 4, 5], {}, "length"),
    ],
)
def test_generation_ends_for_the_right_reason(tokens, stop, reason):
    schedule = scheduler()
    schedule.add(running(1, 3, **stop))
    reasons = [step(schedule, token)[1][0].reason for token in tokens]
    assert reasons == [""] * (len(tokens) - 1) + [reason]
    assert schedule.plan() is None


def test_tokens_that_would_end_it_are_banned_before_min_tokens():
    schedule = scheduler()
    schedule.add(running(1, 3, min_tokens=2, stop_token_ids=frozenset({42})))
    bans = []
    for _ in range(3):
        planned = schedule.plan()
        bans.append(planned.plan.rows[0].draw.banned_token_ids)
        schedule.apply(planned, StepResult(token_ids=(7,)))
    assert bans == [{99, 42}, {99, 42}, set()]


def test_a_removed_sequence_is_not_planned_again():
    schedule = scheduler()
    schedule.add(running(1, 3))
    assert schedule.remove(1)
    assert not schedule.remove(1)
    assert schedule.plan() is None


def test_queued_tokens_count_what_is_not_computed_of_prompts():
    schedule = scheduler()
    schedule.add(running(1, 12))
    assert schedule.num_queued_tokens == 12
    step(schedule)
    assert schedule.num_queued_tokens == 4
    step(schedule)
    assert schedule.num_queued_tokens == 0


def test_a_resumed_output_counts_against_max_tokens():
    spec = GenerationSpec(
        request_id="r",
        token_ids=(1, 2, 3, 4, 5),
        num_prompt_tokens=3,
        stop=StopConditions(max_tokens=3),
    )
    assert finish_reason(spec, 8, position=5, eos_token_ids=EOS) == "length"


def test_shapes_count_attended_positions():
    assert decode_shape(9).decode_context == 10
    assert chunk_shape(2, 3).prefill_context == 3 + 4 + 5
    assert row_shape(5, 1) == decode_shape(5)
    assert row_shape(0, 1) == chunk_shape(0, 1)
