"""From the wire to a GenerationSpec, checked: what a node believes of a Sequence.

The coordinator checks requests for its clients; a node checks again, because it indexes memory
with what it is sent. Every error names the field and the limit.
"""

import math
import struct

from engine.sequence import GenerationSpec, SamplingParams, StopConditions
from protos.errors import Reason, ServingError, invalid
from protos.pd.v1 import types_pb2


def read_sequence(
    sequence: types_pb2.Sequence, *, model: str, vocab_size: int, max_model_len: int
) -> GenerationSpec:
    """Raises ServingError: UNKNOWN_MODEL, INVALID_ARGUMENT, CONTEXT_TOO_LONG, NOT_SERVED_YET."""
    if sequence.model != model:
        raise ServingError(
            Reason.UNKNOWN_MODEL, f"this node serves {model!r}", model=sequence.model
        )
    refuse_unserved(
        num_choices=sequence.num_choices > 1,
        num_logprobs=sequence.HasField("num_logprobs"),
        num_prompt_logprobs=sequence.HasField("num_prompt_logprobs"),
    )
    token_ids = _unpack(sequence.token_ids, vocab_size=vocab_size)
    if not 1 <= sequence.num_prompt_tokens <= len(token_ids):
        raise invalid(
            "num_prompt_tokens", f"{sequence.num_prompt_tokens} is not in 1..{len(token_ids)}"
        )
    if sequence.stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "0 is below 1")
    spec = GenerationSpec(
        request_id=sequence.request_id,
        token_ids=token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=read_sampling(sequence.sampling),
        stop=StopConditions(
            max_tokens=sequence.stop.max_tokens,
            stop_token_ids=frozenset(sequence.stop.stop_token_ids),
            ignore_eos=sequence.stop.ignore_eos,
            min_tokens=sequence.stop.min_tokens,
        ),
        seed=sequence.seed,
    )
    if spec.max_num_tokens > max_model_len:
        raise ServingError(
            Reason.CONTEXT_TOO_LONG,
            f"{spec.num_prompt_tokens} prompt tokens and {spec.stop.max_tokens} more exceed the "
            f"context of {max_model_len}",
            limit=max_model_len,
        )
    if len(token_ids) >= spec.max_num_tokens:
        raise invalid("token_ids", "nothing is left to generate")
    return spec


def read_sampling(sampling: types_pb2.SamplingParams) -> SamplingParams:
    """Raises ServingError (INVALID_ARGUMENT, NOT_SERVED_YET) with the field and its range."""
    refuse_unserved(
        **{
            "sampling.repetition_penalty": sampling.HasField("repetition_penalty"),
            "sampling.presence_penalty": sampling.presence_penalty != 0,
            "sampling.frequency_penalty": sampling.frequency_penalty != 0,
            "sampling.logit_bias": bool(sampling.logit_bias),
        }
    )
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    _check(sampling.temperature, "temperature", 0.0, 100.0)
    _check(top_p, "top_p", 0.0, 1.0, low_is_open=True)
    _check(sampling.min_p, "min_p", 0.0, 1.0)
    return SamplingParams(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=top_p, min_p=sampling.min_p
    )


def _check(value: float, name: str, low: float, high: float, *, low_is_open: bool = False) -> None:
    in_range = low < value <= high if low_is_open else low <= value <= high
    if math.isnan(value) or not in_range:
        bracket = "(" if low_is_open else "["
        raise invalid(f"sampling.{name}", f"{value:g} is not in {bracket}{low:g}, {high:g}]")


def _unpack(packed: bytes, *, vocab_size: int) -> tuple[int, ...]:
    if not packed or len(packed) % 4:
        raise invalid("token_ids", f"{len(packed)} bytes are not packed int32 ids")
    token_ids = struct.unpack(f"<{len(packed) // 4}i", packed)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise invalid("token_ids", f"ids are not in 0..{vocab_size - 1}")
    return token_ids


def refuse_unserved(**fields: bool) -> None:
    """Raises ServingError (NOT_SERVED_YET) for the first field that is set."""
    for field, is_set in fields.items():
        if is_set:
            raise ServingError(Reason.NOT_SERVED_YET, f"{field} is not served yet", field=field)
