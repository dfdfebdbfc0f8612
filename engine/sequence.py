"""What a request is inside a node: tokens, and how to continue them.

    wire Sequence --servicer--> GenerationSpec --engine--> rows of a step, sampled tokens

Values only; the engine's mutable state of a running sequence is in engine/scheduler.py.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from its logits. temperature 0 is greedy; top_k 0 keeps all.

    logit_bias is (token id, what is added to its logit), each id once. What the penalties mean is
    said in engine/sampler.py.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on which tokens came before, not only on their number."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """When a choice ends. max_tokens counts from the end of the prompt.

    eos_token_ids is the model's list; with ignore_eos it is not looked at. Before min_tokens are
    out, neither kind of token is drawn.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """One request, complete: the same spec gives the same tokens wherever it runs.

    token_ids holds the prompt and, for a resumed request, what was generated before;
    num_prompt_tokens tells them apart. num_logprobs and num_prompt_logprobs are how many
    alternatives to report per token, generated or of the prompt; None: no log-probabilities.
    cache_salt is part of the hashes by which its blocks can be found.
    priority (higher first), tenant and age_s, the time since the coordinator took the request in,
    say when it is computed, never what.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopConditions
    seed: int = 0
    choice: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    cache_salt: bytes = b""
    priority: int = 0
    tenant: str = ""
    age_s: float = 0.0

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output together, at most."""
        return self.num_prompt_tokens + self.stop.max_tokens


def finish_reason(
    spec: GenerationSpec, token_id: int, *, position: int, eos_token_ids: frozenset[int]
) -> str:
    """Why a generation ends with token_id at position: "eos", "stop", "length"; "" if it goes on.

    A stop token that is also an end-of-sequence token counts as what was asked for: "stop".
    """
    if token_id in spec.stop.stop_token_ids:
        return "stop"
    if token_id in eos_token_ids and not spec.stop.ignore_eos:
        return "eos"
    if position + 1 >= spec.max_num_tokens:
        return "length"
    return ""
