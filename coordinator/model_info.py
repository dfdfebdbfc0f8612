"""What GetModel tells: the model that a coordinator serves, and the limits of a request to it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The largest values that are not refused."""

    max_choices: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_message_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """max_model_len counts prompt and output, in tokens, on the nodes that serve now."""

    model: str
    vocab_size: int
    max_model_len: int
    has_chat_template: bool
    limits: RequestLimits


def read_model_info(answer: Any) -> ModelInfo:
    """The model of a GetModelResponse."""
    limits = answer.limits
    return ModelInfo(
        model=answer.model,
        vocab_size=answer.vocab_size,
        max_model_len=answer.max_model_len,
        has_chat_template=answer.has_chat_template,
        limits=RequestLimits(
            **{field.name: getattr(limits, field.name) for field in limits.DESCRIPTOR.fields}
        ),
    )
