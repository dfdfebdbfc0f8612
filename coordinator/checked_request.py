"""A client's request, checked and tokenized: from here on it is token ids and limits.

Sizes are checked before anything of that size is made; every error names the field and the limit.
"""

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from coordinator.answer import Answer
from coordinator.need import Need, no_hashes
from coordinator.prompt_prefix import PromptPrefix, tenant_salt
from coordinator.tokenizer import ModelTokenizer
from engine.incoming import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_LOGPROBS, read_sampling
from protos.errors import Reason, ServingError, invalid
from protos.pd.v1 import generation_pb2, types_pb2

DEFAULT_MAX_TOKENS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_CHAT_MESSAGES = 4096
MAX_ID_LENGTH = 128
# Of an absolute value.
MAX_PRIORITY = 100
# A generation request; protos/serving.py refuses larger messages unread.
MAX_REQUEST_BYTES = 4 * 1024 * 1024
# A token is rarely longer; what is longer than this cannot fit and is not tokenized.
MAX_BYTES_PER_TOKEN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLimits:
    """What this coordinator serves. max_model_len counts prompt and output, in tokens."""

    model: str
    vocab_size: int
    max_model_len: int


def request_limits() -> generation_pb2.RequestLimits:
    """What GetModel tells of the numbers above."""
    return generation_pb2.RequestLimits(
        max_choices=MAX_CHOICES,
        max_logprobs=MAX_LOGPROBS,
        max_stop_strings=MAX_STOP_STRINGS,
        max_stop_string_bytes=MAX_STOP_STRING_BYTES,
        max_stop_token_ids=MAX_STOP_TOKEN_IDS,
        max_logit_bias=MAX_LOGIT_BIAS,
        max_message_bytes=MAX_REQUEST_BYTES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """token_ids is the prompt. num_logprobs and num_prompt_logprobs are None when not asked for."""

    request_id: str
    token_ids: tuple[int, ...]
    seed: int
    sampling: types_pb2.SamplingParams
    stop: types_pb2.StopConditions
    num_choices: int = 1
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    priority: int = 0
    tenant: str = ""
    prefix: PromptPrefix = field(compare=False)

    def need(self, answers: Sequence[Answer]) -> Need:
        """What it takes to go on from answers, those that have not ended."""
        token_ids = self._tokens(answers)
        # The score of a token takes its forward pass: such a prompt is computed whole.
        is_cachable = self.num_prompt_logprobs is None
        return Need(
            num_prompt_tokens=len(token_ids),
            max_num_tokens=len(self.token_ids) + self.stop.max_tokens,
            num_choices=len(answers),
            block_hashes=partial(self.prefix.hashes, token_ids) if is_cachable else no_hashes,
        )

    def to_sequence(
        self,
        answers: Sequence[Answer],
        *,
        model: str,
        age_s: float,
        attempt: int,
        scores_prompt: bool,
    ) -> types_pb2.Sequence:
        """The request as nodes see it, going on from answers, those that have not ended.

        scores_prompt: prompt logprobs were asked for, and not all are there yet.
        """
        sequence = types_pb2.Sequence(
            request_id=self.request_id,
            attempt=attempt,
            token_ids=_packed(self._tokens(answers)),
            num_prompt_tokens=len(self.token_ids),
            sampling=self.sampling,
            stop=self.stop,
            seed=self.seed,
            num_choices=len(answers),
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.prefix.salt,
            num_logprobs=self.num_logprobs,
            model=model,
        )
        if len(answers) > 1 or answers[0].choice > 0:
            sequence.choices.extend(
                types_pb2.ChoiceProgress(
                    choice=answer.choice,
                    token_ids=_packed(answer.token_ids) if len(answers) > 1 else b"",
                )
                for answer in answers
            )
        if self.num_prompt_logprobs is not None and scores_prompt:
            sequence.num_prompt_logprobs = self.num_prompt_logprobs
        sequence.age.FromNanoseconds(int(age_s * 1e9))
        return sequence

    def _tokens(self, answers: Sequence[Answer]) -> tuple[int, ...]:
        """The prompt, and what the only answer that has not ended has generated."""
        if len(answers) != 1 or not answers[0].token_ids:
            return self.token_ids
        return (*self.token_ids, *answers[0].token_ids)


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


async def check_request(
    request: generation_pb2.GenerateRequest,
    *,
    request_id: str,
    tokenizer: ModelTokenizer,
    limits: ServedLimits,
    shares_cache: bool = False,
) -> CheckedRequest:
    """shares_cache: tenants may find each other's blocks. Raises ServingError with the field that
    is wrong."""
    if len(request_id) > MAX_ID_LENGTH or not request_id.isprintable():
        raise invalid("request_id", f"is not up to {MAX_ID_LENGTH} printable characters")
    if request.model and request.model != limits.model:
        raise ServingError(
            Reason.UNKNOWN_MODEL,
            f"model: {request.model[:MAX_ID_LENGTH]!r} is not served, {limits.model!r} is",
            field="model",
        )
    _check_counts(request)
    read_sampling(request.sampling, vocab_size=limits.vocab_size)
    _check_stop(request.stop, limits)
    token_ids = await check_prompt(request, tokenizer, limits)
    return CheckedRequest(
        request_id=request_id,
        token_ids=token_ids,
        seed=request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(63),
        sampling=request.sampling,
        stop=_stop(request.stop, num_prompt_tokens=len(token_ids), limits=limits),
        num_choices=max(1, request.n),
        num_logprobs=request.logprobs if request.HasField("logprobs") else None,
        num_prompt_logprobs=(
            request.prompt_logprobs if request.HasField("prompt_logprobs") else None
        ),
        priority=request.priority,
        tenant=request.tenant,
        prefix=PromptPrefix(salt=tenant_salt(request.tenant, is_shared=shares_cache)),
    )


def _check_counts(request: generation_pb2.GenerateRequest) -> None:
    if request.n > MAX_CHOICES:
        raise invalid("n", f"{request.n} is above the limit of {MAX_CHOICES}")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(request, name) > MAX_LOGPROBS:
            raise invalid(name, f"{getattr(request, name)} is above the limit of {MAX_LOGPROBS}")
    if abs(request.priority) > MAX_PRIORITY:
        raise invalid("priority", f"{request.priority} is not in -{MAX_PRIORITY}..{MAX_PRIORITY}")
    if len(request.tenant) > MAX_ID_LENGTH or not request.tenant.isprintable():
        raise invalid("tenant", f"is not up to {MAX_ID_LENGTH} printable characters")


def _check_stop(stop: types_pb2.StopConditions, limits: ServedLimits) -> None:
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "0 is below 1")
    if len(stop.stop_strings) > MAX_STOP_STRINGS:
        raise invalid("stop.stop_strings", f"has more than {MAX_STOP_STRINGS} entries")
    for text in stop.stop_strings:
        if not 1 <= len(text.encode()) <= MAX_STOP_STRING_BYTES:
            raise invalid("stop.stop_strings", f"an entry is not 1..{MAX_STOP_STRING_BYTES} bytes")
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop.stop_token_ids", f"has more than {MAX_STOP_TOKEN_IDS} entries")
    if any(token_id >= limits.vocab_size for token_id in stop.stop_token_ids):
        raise invalid("stop.stop_token_ids", f"ids are not in 0..{limits.vocab_size - 1}")


async def check_prompt(
    request: generation_pb2.GenerateRequest, tokenizer: ModelTokenizer, limits: ServedLimits
) -> tuple[int, ...]:
    """The prompt's tokens. Raises ServingError with the field that is wrong."""
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
