"""A client's request, checked and tokenized: from here on it is token ids and limits.

Sizes are checked before anything of that size is made; every error names the field and the limit.
"""

import secrets
import struct
from dataclasses import dataclass

from coordinator.pairing import Need
from coordinator.tokenizer import ModelTokenizer
from engine.incoming import read_sampling, refuse_unserved
from protos.errors import Reason, ServingError, invalid
from protos.pd.v1 import generation_pb2, types_pb2

DEFAULT_MAX_TOKENS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_CHAT_MESSAGES = 4096
MAX_ID_LENGTH = 128
# A token is rarely longer; what is longer than this cannot fit and is not tokenized.
MAX_BYTES_PER_TOKEN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLimits:
    """What this coordinator serves. max_model_len counts prompt and output, in tokens."""

    model: str
    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    request_id: str
    token_ids: tuple[int, ...]
    seed: int
    sampling: types_pb2.SamplingParams
    stop: types_pb2.StopConditions

    @property
    def need(self) -> Need:
        num_prompt_tokens = len(self.token_ids)
        return Need(
            num_prompt_tokens=num_prompt_tokens,
            max_num_tokens=num_prompt_tokens + self.stop.max_tokens,
        )

    def to_sequence(self, *, model: str, age_s: float) -> types_pb2.Sequence:
        """The request as nodes see it."""
        sequence = types_pb2.Sequence(
            request_id=self.request_id,
            token_ids=struct.pack(f"<{len(self.token_ids)}i", *self.token_ids),
            num_prompt_tokens=len(self.token_ids),
            sampling=self.sampling,
            stop=self.stop,
            seed=self.seed,
            num_choices=1,
            model=model,
        )
        sequence.age.FromNanoseconds(int(age_s * 1e9))
        return sequence


async def check_request(
    request: generation_pb2.GenerateRequest,
    *,
    request_id: str,
    tokenizer: ModelTokenizer,
    limits: ServedLimits,
) -> CheckedRequest:
    """Raises ServingError with the field that is wrong."""
    if len(request_id) > MAX_ID_LENGTH or not request_id.isprintable():
        raise invalid("request_id", f"is not up to {MAX_ID_LENGTH} printable characters")
    if request.model and request.model != limits.model:
        raise ServingError(
            Reason.UNKNOWN_MODEL,
            f"model: {request.model[:MAX_ID_LENGTH]!r} is not served, {limits.model!r} is",
            field="model",
        )
    _refuse_unserved(request)
    read_sampling(request.sampling)
    _check_stop(request.stop, limits)
    token_ids = await _prompt(request, tokenizer, limits)
    return CheckedRequest(
        request_id=request_id,
        token_ids=token_ids,
        seed=request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(63),
        sampling=request.sampling,
        stop=_stop(request.stop, num_prompt_tokens=len(token_ids), limits=limits),
    )


def _refuse_unserved(request: generation_pb2.GenerateRequest) -> None:
    refuse_unserved(
        **{
            "n": request.n > 1,
            "logprobs": request.HasField("logprobs"),
            "prompt_logprobs": request.HasField("prompt_logprobs"),
            "priority": request.priority != 0,
            "tenant": bool(request.tenant),
            "stop.stop_strings": bool(request.stop.stop_strings),
        }
    )


def _check_stop(stop: types_pb2.StopConditions, limits: ServedLimits) -> None:
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "0 is below 1")
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop.stop_token_ids", f"has more than {MAX_STOP_TOKEN_IDS} entries")
    if any(token_id >= limits.vocab_size for token_id in stop.stop_token_ids):
        raise invalid("stop.stop_token_ids", f"ids are not in 0..{limits.vocab_size - 1}")


async def _prompt(
    request: generation_pb2.GenerateRequest, tokenizer: ModelTokenizer, limits: ServedLimits
) -> tuple[int, ...]:
    match request.WhichOneof("prompt"):
        case "token_ids":
            _check_length("token_ids", len(request.token_ids.ids), limits)
            token_ids = tuple(request.token_ids.ids)
            if any(token_id >= limits.vocab_size for token_id in token_ids):
                raise invalid("token_ids", f"ids are not in 0..{limits.vocab_size - 1}")
        case "text":
            _check_bytes("text", len(request.text), limits)
            token_ids = tuple(await tokenizer.encode_async(request.text))
            _check_length("text", len(token_ids), limits)
        case "chat":
            if len(request.chat.messages) > MAX_CHAT_MESSAGES:
                raise invalid("chat.messages", f"has more than {MAX_CHAT_MESSAGES} entries")
            messages = request.chat.messages
            size = sum(len(message.role) + len(message.content) for message in messages)
            _check_bytes("chat", size, limits)
            chat = [{"role": message.role, "content": message.content} for message in messages]
            try:
                token_ids = tuple(await tokenizer.encode_chat_async(chat))
            except ValueError as error:
                raise invalid("chat", str(error)) from error
            _check_length("chat", len(token_ids), limits)
        case _:
            raise invalid("prompt", "is not set")
    return token_ids


def _check_bytes(field: str, size: int, limits: ServedLimits) -> None:
    limit = limits.max_model_len * MAX_BYTES_PER_TOKEN
    if size > limit:
        raise ServingError(
            Reason.PROMPT_TOO_LARGE,
            f"{field}: {size} characters are over the limit of {limit}",
            field=field,
            limit=limit,
        )


def _check_length(field: str, num_tokens: int, limits: ServedLimits) -> None:
    if num_tokens == 0:
        raise invalid(field, "the prompt is empty")
    if num_tokens >= limits.max_model_len:
        raise ServingError(
            Reason.CONTEXT_TOO_LONG,
            f"{field}: {num_tokens} prompt tokens leave no room in a context of "
            f"{limits.max_model_len}",
            field=field,
            limit=limits.max_model_len,
        )


def _stop(
    stop: types_pb2.StopConditions, *, num_prompt_tokens: int, limits: ServedLimits
) -> types_pb2.StopConditions:
    """With max_tokens set: the client's, or a default cut to what the context leaves."""
    room = limits.max_model_len - num_prompt_tokens
    if stop.HasField("max_tokens") and stop.max_tokens > room:
        raise ServingError(
            Reason.CONTEXT_TOO_LONG,
            f"stop.max_tokens: {stop.max_tokens} and {num_prompt_tokens} prompt tokens exceed the "
            f"context of {limits.max_model_len}",
            field="stop.max_tokens",
            limit=limits.max_model_len,
        )
    result = types_pb2.StopConditions()
    result.CopyFrom(stop)
    result.max_tokens = stop.max_tokens or min(DEFAULT_MAX_TOKENS, room)
    return result
