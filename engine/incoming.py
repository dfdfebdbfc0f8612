"""From the wire to a GenerationSpec, checked: what a node believes of a Sequence.

The coordinator checks requests for its clients; a node checks again, because it indexes memory
with what it is sent. Every error names the field and the limit.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import replace

from engine.sequence import GenerationSpec, SamplingParams, StopConditions
from protos.errors import Reason, ServingError, invalid
from protos.pd.v1 import types_pb2

# Alternatives to report per token.
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_CACHE_SALT_BYTES = 64
MAX_LOGIT_BIAS = 300
# Of an absolute value: it decides as good as alone what is drawn.
MAX_BIAS = 100.0


def read_sequence(
    sequence: types_pb2.Sequence, *, model: str, vocab_size: int, max_model_len: int
) -> GenerationSpec:
    """Raises ServingError: UNKNOWN_MODEL, INVALID_ARGUMENT, CONTEXT_TOO_LONG."""
    if sequence.model != model:
        raise ServingError(
            Reason.UNKNOWN_MODEL, f"this node serves {model!r}", model=sequence.model
        )
    token_ids = _unpack(sequence.token_ids, vocab_size=vocab_size)
    if not 1 <= sequence.num_prompt_tokens <= len(token_ids):
        raise invalid(
            "num_prompt_tokens", f"{sequence.num_prompt_tokens} is not in 1..{len(token_ids)}"
        )
    spec = GenerationSpec(
        request_id=sequence.request_id,
        token_ids=token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=read_sampling(sequence.sampling, vocab_size=vocab_size),
        stop=_read_stop(sequence.stop, vocab_size=vocab_size),
        seed=sequence.seed,
        choice=sequence.choices[0].choice if sequence.choices else 0,
        num_logprobs=_read_logprobs(sequence, "num_logprobs"),
        num_prompt_logprobs=_read_logprobs(sequence, "num_prompt_logprobs"),
        cache_salt=_read_salt(sequence.cache_salt),
        priority=sequence.priority,
        tenant=sequence.tenant,
        age_s=sequence.age.ToNanoseconds() / 1e9,
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


def read_choices(
    sequence: types_pb2.Sequence, spec: GenerationSpec, *, vocab_size: int
) -> list[GenerationSpec]:
    """The choices to generate, the first of which prefills; spec is the sequence's own.

    Raises ServingError (INVALID_ARGUMENT).
    """
    if not 1 <= max(1, sequence.num_choices) <= MAX_CHOICES:
        raise invalid("num_choices", f"{sequence.num_choices} is above the limit of {MAX_CHOICES}")
    progress = list(sequence.choices) or [
        types_pb2.ChoiceProgress(choice=choice) for choice in range(max(1, sequence.num_choices))
    ]
    if len(progress) != max(1, sequence.num_choices):
        raise invalid("choices", f"{len(progress)} entries for {sequence.num_choices} choices")
    specs = []
    for one in progress:
        more = _unpack(one.token_ids, vocab_size=vocab_size) if one.token_ids else ()
        specs.append(replace(spec, choice=one.choice, token_ids=(*spec.token_ids, *more)))
        if len(specs[-1].token_ids) >= spec.max_num_tokens:
            raise invalid("choices", f"nothing is left to generate of choice {one.choice}")
    return specs


def read_sampling(sampling: types_pb2.SamplingParams, *, vocab_size: int) -> SamplingParams:
    """Raises ServingError (INVALID_ARGUMENT) with the field and its range."""
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    _check(sampling.temperature, "temperature", 0.0, 100.0)
    _check(top_p, "top_p", 0.0, 1.0, low_is_open=True)
    _check(sampling.min_p, "min_p", 0.0, 1.0)
    _check(repetition, "repetition_penalty", 0.0, 100.0, low_is_open=True)
    _check(sampling.presence_penalty, "presence_penalty", -2.0, 2.0)
    _check(sampling.frequency_penalty, "frequency_penalty", -2.0, 2.0)
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=top_p,
        min_p=sampling.min_p,
        repetition_penalty=repetition,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=_read_bias(sampling.logit_bias, vocab_size=vocab_size),
    )


def _read_bias(
    logit_bias: Mapping[int, float], *, vocab_size: int
) -> tuple[tuple[int, float], ...]:
    """In the order of ids, so that equal maps give equal params."""
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise invalid("sampling.logit_bias", f"has more than {MAX_LOGIT_BIAS} entries")
    for token_id, bias in logit_bias.items():
        if token_id >= vocab_size:
            raise invalid("sampling.logit_bias", f"ids are not in 0..{vocab_size - 1}")
        _check(bias, "logit_bias", -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(logit_bias.items()))


def _read_stop(stop: types_pb2.StopConditions, *, vocab_size: int) -> StopConditions:
    if stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "0 is below 1")
    if any(token_id >= vocab_size for token_id in stop.stop_token_ids):
        raise invalid("stop.stop_token_ids", f"ids are not in 0..{vocab_size - 1}")
    return StopConditions(
        max_tokens=stop.max_tokens,
        stop_token_ids=frozenset(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        min_tokens=stop.min_tokens,
    )


def _read_salt(cache_salt: bytes) -> bytes:
    if len(cache_salt) > MAX_CACHE_SALT_BYTES:
        raise invalid(
            "cache_salt", f"{len(cache_salt)} bytes are above the limit of {MAX_CACHE_SALT_BYTES}"
        )
    return cache_salt


def _read_logprobs(sequence: types_pb2.Sequence, field: str) -> int | None:
    if not sequence.HasField(field):
        return None
    count: int = getattr(sequence, field)
    if count > MAX_LOGPROBS:
        raise invalid(field, f"{count} is above the limit of {MAX_LOGPROBS}")
    return count


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
