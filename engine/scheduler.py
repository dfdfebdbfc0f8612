"""What to compute next: the same pure scheduler on prefill and decode nodes.

    add --> [prefilling --chunks--> decoding --tokens-->] leaves: finished, limit reached, removed

A step takes every decode row, then prompt chunks in order of arrival while the predicted time
stays within the budget; chunks end on block edges. A step of prompts alone may last several
budgets: no stream waits for it, and long chunks compute faster. The first prompt in line always
gets at least a block, so that a full decode batch cannot starve it. No torch, no clock, no locks:
the engine thread (or a simulator) owns it.
"""

from dataclasses import dataclass, field

from engine.cost_model import CostProfile, StepShape, row_shape
from engine.executor import Draw, Row, StepPlan, StepResult
from engine.sequence import GenerationSpec, finish_reason

# Budgets that a step without decode rows may last.
PROMPT_BUDGETS = 4


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A sequence in the engine. KV of the first num_computed of token_ids is in block_table.

    It leaves after max_new_tokens tokens were drawn here, finished or not (a prefill node: 1).
    """

    key: int
    spec: GenerationSpec
    block_table: tuple[int, ...]
    token_ids: list[int]
    num_computed: int
    max_new_tokens: int
    num_drawn: int = 0

    @property
    def num_remaining(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 1 and self.num_computed >= self.spec.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a step did for one sequence. token_id is None until the prompt's end is computed.

    reason is set when token_id ends the generation; left, when the sequence left the engine.
    """

    key: int
    num_computed: int
    token_id: int | None = None
    position: int = 0
    reason: str = ""
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """A plan, whose rows belong to keys in the same order, and what it costs."""

    plan: StepPlan
    keys: tuple[int, ...]
    shape: StepShape


@dataclass(slots=True)
class Scheduler:
    """Sequences in order of arrival. eos_token_ids are the model's."""

    profile: CostProfile
    step_budget_ms: float
    block_size: int
    eos_token_ids: frozenset[int] = frozenset()
    _running: dict[int, Running] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return sum(s.num_remaining for s in self._running.values() if not s.is_decoding)

    def add(self, sequence: Running) -> None:
        assert sequence.num_remaining > 0
        assert self.block_size * len(sequence.block_table) >= len(sequence.token_ids)
        self._running[sequence.key] = sequence

    def remove(self, key: int) -> bool:
        """Takes a sequence out between steps. False if it is not here."""
        return self._running.pop(key, None) is not None

    def plan(self) -> ScheduledStep | None:
        """The next step; None when there is nothing to compute."""
        chosen: list[tuple[Running, int]] = []
        shape = StepShape()
        for sequence in self._running.values():
            if sequence.is_decoding:
                chosen.append((sequence, 1))
                shape += row_shape(sequence.num_computed, 1)
        budget_ms = self.step_budget_ms * (1 if chosen else PROMPT_BUDGETS)
        is_first_prompt = True
        for sequence in self._running.values():
            if sequence.is_decoding:
                continue
            num_tokens = self._chunk(
                sequence, shape, budget_ms=budget_ms, at_least_a_block=is_first_prompt
            )
            if num_tokens == 0:
                break
            is_first_prompt = False
            chosen.append((sequence, num_tokens))
            shape += row_shape(sequence.num_computed, num_tokens)
        if not chosen:
            return None
        return ScheduledStep(
            plan=StepPlan(rows=tuple(self._row(seq, count) for seq, count in chosen)),
            keys=tuple(sequence.key for sequence, _ in chosen),
            shape=shape,
        )

    def apply(self, step: ScheduledStep, result: StepResult) -> list[Progress]:
        """Takes in what the step drew; sequences that are through leave."""
        progress = []
        for key, row, token_id in zip(step.keys, step.plan.rows, result.token_ids, strict=True):
            sequence = self._running[key]
            sequence.num_computed += len(row.token_ids)
            progress.append(self._advance(sequence, token_id))
        return progress

    def _chunk(
        self, sequence: Running, shape: StepShape, *, budget_ms: float, at_least_a_block: bool
    ) -> int:
        start, remaining = sequence.num_computed, sequence.num_remaining
        num_tokens = self.profile.largest_chunk(
            start=start,
            remaining=remaining,
            block_size=self.block_size,
            so_far=shape,
            budget_ms=budget_ms,
        )
        if num_tokens == 0 and at_least_a_block:
            return min(remaining, self.block_size - start % self.block_size)
        return num_tokens

    def _row(self, sequence: Running, num_tokens: int) -> Row:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        num_blocks = -(-end // self.block_size)
        draws = end == len(sequence.token_ids)
        return Row(
            token_ids=sequence.token_ids[start:end],
            start=start,
            block_table=sequence.block_table[:num_blocks],
            draw=self._draw(sequence) if draws else None,
        )

    def _draw(self, sequence: Running) -> Draw:
        spec, position = sequence.spec, len(sequence.token_ids)
        banned: frozenset[int] = frozenset()
        if position - spec.num_prompt_tokens < spec.stop.min_tokens:
            eos = frozenset() if spec.stop.ignore_eos else self.eos_token_ids
            banned = eos | spec.stop.stop_token_ids
        return Draw(
            sampling=spec.sampling,
            seed=spec.seed,
            choice=spec.choice,
            position=position,
            banned_token_ids=banned,
        )

    def _advance(self, sequence: Running, token_id: int | None) -> Progress:
        if token_id is None:
            return Progress(key=sequence.key, num_computed=sequence.num_computed)
        position = len(sequence.token_ids)
        sequence.token_ids.append(token_id)
        sequence.num_drawn += 1
        reason = finish_reason(
            sequence.spec, token_id, position=position, eos_token_ids=self.eos_token_ids
        )
        left = bool(reason) or sequence.num_drawn >= sequence.max_new_tokens
        if left:
            del self._running[sequence.key]
        return Progress(
            key=sequence.key,
            num_computed=sequence.num_computed,
            token_id=token_id,
            position=position,
            reason=reason,
            left=left,
        )
