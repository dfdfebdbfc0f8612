"""What to compute next: the same pure scheduler on prefill and decode nodes.

    add --> [prefilling --chunks--> decoding --tokens-->] leaves: finished, limit reached, removed

A step takes every decode row, then prompt chunks, short ones first, while the predicted time stays
within the budget; chunks end on block edges. A step of prompts alone may last several
budgets: no stream waits for it, and long chunks compute faster. The first prompt in line always
gets at least a block, so that a full decode batch cannot starve it. Of tokens that are scored, for
prompt logprobs, a step takes few, because each needs logits. No torch, no clock, no locks: the
engine thread (or a simulator) owns it.
"""

from dataclasses import dataclass, field
from itertools import repeat

from engine.cost_model import CostProfile, StepShape, row_shape
from engine.executor import (
    Draw,
    History,
    PromptLogprobs,
    Row,
    Scoring,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from engine.sequence import GenerationSpec, finish_reason

# Budgets that a step without decode rows may last.
PROMPT_BUDGETS = 4

# Tokens of a step that are scored; more only where a block is larger. Logits of so many are held.
MAX_SCORED_TOKENS = 256


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A sequence in the engine. KV of the first num_computed of token_ids is in block_table.

    It leaves after max_new_tokens tokens were drawn here, finished or not (a prefill node: 1).
    block_table grows, by its owner; arrived_s is when its request came to a coordinator, on this
    node's clock; waited_ms is predicted time of the steps since it came here.
    """

    key: int
    spec: GenerationSpec
    block_table: list[int]
    token_ids: list[int]
    num_computed: int
    max_new_tokens: int
    num_drawn: int = 0
    arrived_s: float = 0.0
    waited_ms: float = 0.0

    @property
    def num_remaining(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        # Asked of every sequence before every step.
        num_computed = self.num_computed
        return (
            len(self.token_ids) - num_computed == 1 and num_computed >= self.spec.num_prompt_tokens
        )

    @property
    def is_scored(self) -> bool:
        """Whether its next chunk has prompt tokens to score: each after the first."""
        if self.spec.num_prompt_logprobs is None:
            return False
        return self.num_computed + 1 < self.spec.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a step did for one sequence. token_id is None until the prompt's end is computed.

    reason is set when token_id ends the generation; left, when the sequence left the engine.
    logprobs are of token_id; prompt_logprobs of the prompt tokens that this step scored. What
    was computed before the sequence came here is not scored.
    """

    key: int
    num_computed: int
    token_id: int | None = None
    position: int = 0
    reason: str = ""
    left: bool = False
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """A plan, whose rows belong to keys in the same order, and what it costs."""

    plan: StepPlan
    keys: tuple[int, ...]
    shape: StepShape


def _seniority(sequence: Running) -> tuple[int, float]:
    """Lowest for who is served first."""
    return (-sequence.spec.priority, sequence.arrived_s)


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

    def in_need_of_blocks(self) -> list[Running]:
        """Sequences whose next token has no place yet, the oldest first."""
        waiting = [s for s in self._running.values() if self._is_stalled(s)]
        return sorted(waiting, key=_seniority)

    def victim(self) -> Running | None:
        """Who leaves when no block is free: the youngest of the lowest priority; never the only
        one."""
        if len(self._running) < 2:
            return None
        return max(self._running.values(), key=_seniority)

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
        prompts: list[Running] = []
        context = 0
        for sequence in self._running.values():
            if not sequence.is_decoding:
                prompts.append(sequence)
            elif not self._is_stalled(sequence):
                chosen.append((sequence, 1))
                context += sequence.num_computed + 1
        shape = StepShape(num_decode_rows=len(chosen), decode_context=context)
        budget_ms = self.step_budget_ms * (1 if chosen else PROMPT_BUDGETS)
        is_first_prompt = True
        num_scored = 0
        for sequence in self._in_turn(prompts):
            limit = self._limit(sequence, num_scored=num_scored)
            if limit == 0 and not is_first_prompt:
                continue
            num_tokens = self._chunk(
                sequence, shape, limit=limit, budget_ms=budget_ms, at_least_a_block=is_first_prompt
            )
            if num_tokens == 0:
                break
            is_first_prompt = False
            num_scored += num_tokens if sequence.is_scored else 0
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
        step_ms = self.profile.predict_ms(step.shape)
        for waiting in self._running.values():
            waiting.waited_ms += step_ms
        progress = []
        for key, row, token_id, logprobs, prompt_logprobs in zip(
            step.keys,
            step.plan.rows,
            result.token_ids,
            result.logprobs or repeat(None, len(step.keys)),
            result.prompt_logprobs or repeat(None, len(step.keys)),
            strict=True,
        ):
            sequence = self._running[key]
            sequence.num_computed += len(row.token_ids)
            progress.append(self._advance(sequence, token_id, logprobs, prompt_logprobs))
        return progress

    def _in_turn(self, prompts: list[Running]) -> list[Running]:
        """Higher priority first, then what is left to compute, less the time it has waited.

        So a short prompt passes a long one, but a prompt is only ever passed by those that arrive
        within its own predicted compute time.
        """
        if len(prompts) < 2:
            return prompts
        return sorted(prompts, key=lambda s: (-s.spec.priority, self._left_ms(s) - s.waited_ms))

    def _left_ms(self, sequence: Running) -> float:
        return self.profile.chunk_ms(start=sequence.num_computed, num_tokens=sequence.num_remaining)

    def _is_stalled(self, sequence: Running) -> bool:
        return len(sequence.token_ids) > self.block_size * len(sequence.block_table)

    def _limit(self, sequence: Running, *, num_scored: int) -> int:
        """Tokens that a chunk may have: fewer than remain where they are scored."""
        if not sequence.is_scored:
            return sequence.num_remaining
        start = sequence.num_computed
        end = start + MAX_SCORED_TOKENS - num_scored
        if end >= len(sequence.token_ids):
            return sequence.num_remaining
        return max(0, end // self.block_size * self.block_size - start)

    def _chunk(
        self,
        sequence: Running,
        shape: StepShape,
        *,
        limit: int,
        budget_ms: float,
        at_least_a_block: bool,
    ) -> int:
        start, remaining = sequence.num_computed, sequence.num_remaining
        num_tokens = self.profile.largest_chunk(
            start=start,
            remaining=limit,
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
            scoring=self._scoring(sequence, start, end) if sequence.is_scored else None,
        )

    def _scoring(self, sequence: Running, start: int, end: int) -> Scoring:
        spec = sequence.spec
        assert spec.num_prompt_logprobs is not None
        return Scoring(
            token_ids=sequence.token_ids[start + 1 : min(end + 1, spec.num_prompt_tokens)],
            num_logprobs=spec.num_prompt_logprobs,
        )

    def _draw(self, sequence: Running) -> Draw:
        spec, position = sequence.spec, len(sequence.token_ids)
        history = None
        if spec.sampling.has_penalties:
            history = History(
                token_ids=sequence.token_ids, num_prompt_tokens=spec.num_prompt_tokens
            )
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
            history=history,
            num_logprobs=spec.num_logprobs,
        )

    def _advance(
        self,
        sequence: Running,
        token_id: int | None,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: PromptLogprobs | None,
    ) -> Progress:
        if token_id is None:
            return Progress(
                key=sequence.key,
                num_computed=sequence.num_computed,
                prompt_logprobs=prompt_logprobs,
            )
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
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
