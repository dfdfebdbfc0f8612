"""A client's request: every limit by name, and the sequence that nodes read back from it."""

import pytest

from coordinator.answer import Answer, Marks
from coordinator.checked_request import (
    MAX_BYTES_PER_TOKEN,
    MAX_CHAT_MESSAGES,
    MAX_STOP_TOKEN_IDS,
    CheckedRequest,
    ServedLimits,
    check_request,
    request_limits,
)
from coordinator.need import Need
from coordinator.prompt_prefix import tenant_salt
from coordinator.tokenizer import ModelTokenizer
from engine.catalog import resolve_model
from engine.incoming import read_choices, read_sequence
from engine.sequence import GenerationSpec, SamplingParams, StopConditions
from kvtransfer.layout import KvLayout
from kvtransfer.prefix import prompt_chain, short_hash
from protos.errors import Reason, ServingError
from protos.pd.v1 import generation_pb2, types_pb2

# Ids are bytes.
TOKENIZER = ModelTokenizer(resolve_model("emulated", allow_download=False).folder)
VOCAB_SIZE = 256
LIMITS = ServedLimits(model="m", vocab_size=VOCAB_SIZE, max_model_len=100)
PROMPT = (1, 2, 3, 4, 5)


def client_request(**fields: object) -> generation_pb2.GenerateRequest:
    prompt = {"token_ids": generation_pb2.TokenIds(ids=PROMPT)}
    if fields.keys() & {"text", "chat", "token_ids"}:
        prompt = {}
    return generation_pb2.GenerateRequest(**prompt, **fields)


async def checked(
    *, request_id: str = "r", limits: ServedLimits = LIMITS, **fields: object
) -> CheckedRequest:
    return await check_request(
        client_request(**fields), request_id=request_id, tokenizer=TOKENIZER, limits=limits
    )


def answers(*generated: bytes, choices: tuple[int, ...] | None = None) -> list[Answer]:
    """One that has generated so much, for each of choices; from 0 unless they are given."""
    result = []
    for choice, tokens in zip(choices or range(len(generated)), generated, strict=True):
        answer = Answer(
            choice=choice,
            num_prompt_tokens=len(PROMPT),
            detokenizer=TOKENIZER.detokenizer(),
            stop=types_pb2.StopConditions(),
            marks=Marks(arrived=0.0),
        )
        run = types_pb2.TokenRun(choice=choice, position=len(PROMPT), token_ids=list(tokens))
        answer.push(run, now=1.0)
        result.append(answer)
    return result


STOP, SAMPLING = types_pb2.StopConditions, types_pb2.SamplingParams


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 16},
        {"logprobs": 20},
        {"prompt_logprobs": 20},
        {"priority": 100},
        {"priority": -100},
        {"tenant": "é" * 128},
        {"request_id": "x" * 128},
        {"stop": STOP(stop_strings=["end"] * 16)},
        {"stop": STOP(stop_strings=["é" * 128])},
        {"stop": STOP(stop_token_ids=[VOCAB_SIZE - 1] * MAX_STOP_TOKEN_IDS)},
        {"stop": STOP(max_tokens=95)},
        {"token_ids": generation_pb2.TokenIds(ids=[VOCAB_SIZE - 1] * 99)},
    ],
)
async def test_what_is_at_a_limit_is_taken(fields):
    assert await checked(**fields)


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({"n": 17}, "n", "17 is above the limit of 16"),
        ({"logprobs": 21}, "logprobs", "21 is above the limit of 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "21 is above the limit of 20"),
        ({"priority": 101}, "priority", "101 is not in -100..100"),
        ({"priority": -(2**31)}, "priority", "-2147483648 is not in -100..100"),
        ({"tenant": "x" * 129}, "tenant", "up to 128 printable characters"),
        ({"tenant": "a\nb"}, "tenant", "up to 128 printable characters"),
        ({"request_id": "x" * 129}, "request_id", "up to 128 printable characters"),
        ({"request_id": "a\0"}, "request_id", "up to 128 printable characters"),
        ({"stop": STOP(stop_strings=["end"] * 17)}, "stop.stop_strings", "more than 16 entries"),
        ({"stop": STOP(stop_strings=["é" * 129])}, "stop.stop_strings", "1..256 bytes"),
        ({"stop": STOP(stop_strings=["ok", ""])}, "stop.stop_strings", "1..256 bytes"),
        (
            {"stop": STOP(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1))},
            "stop.stop_token_ids",
            "more than 64 entries",
        ),
        ({"stop": STOP(stop_token_ids=[VOCAB_SIZE])}, "stop.stop_token_ids", "0..255"),
        ({"stop": STOP(max_tokens=0)}, "stop.max_tokens", "0 is below 1"),
        ({"sampling": SAMPLING(temperature=-1)}, "sampling.temperature", r"\[0, 100\]"),
        (
            {"sampling": SAMPLING(logit_bias={VOCAB_SIZE: 1.0})},
            "sampling.logit_bias",
            "0..255",
        ),
        ({"token_ids": generation_pb2.TokenIds()}, "token_ids", "the prompt is empty"),
        ({"text": ""}, "text", "the prompt is empty"),
        ({"token_ids": generation_pb2.TokenIds(ids=[VOCAB_SIZE])}, "token_ids", "0..255"),
        (
            {
                "chat": generation_pb2.ChatMessages(
                    messages=[generation_pb2.ChatMessage()] * (MAX_CHAT_MESSAGES + 1)
                )
            },
            "chat.messages",
            "more than 4096 entries",
        ),
    ],
)
async def test_what_is_over_a_limit_is_refused_with_the_field_and_the_limit(fields, field, limit):
    with pytest.raises(ServingError, match=limit) as error:
        await checked(**fields)
    assert error.value.reason is Reason.INVALID_ARGUMENT
    assert error.value.metadata["field"] == field
    assert error.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("fields", "reason", "field", "limit"),
    [
        (
            {"token_ids": generation_pb2.TokenIds(ids=[1] * 100)},
            Reason.CONTEXT_TOO_LONG,
            "token_ids",
            "100",
        ),
        ({"text": "x" * 100}, Reason.CONTEXT_TOO_LONG, "text", "100"),
        ({"stop": STOP(max_tokens=96)}, Reason.CONTEXT_TOO_LONG, "stop.max_tokens", "100"),
        # Not even tokenized.
        (
            {"text": "x" * (100 * MAX_BYTES_PER_TOKEN + 1)},
            Reason.PROMPT_TOO_LARGE,
            "text",
            "3200",
        ),
    ],
)
async def test_what_does_not_fit_the_context_is_refused_with_the_limit(
    fields, reason, field, limit
):
    with pytest.raises(ServingError) as error:
        await checked(**fields)
    assert error.value.reason is reason
    assert error.value.metadata == {"field": field, "limit": limit}


async def test_a_prompt_is_needed_and_the_model_must_be_the_served_one():
    empty = generation_pb2.GenerateRequest()
    with pytest.raises(ServingError, match="prompt: is not set"):
        await check_request(empty, request_id="r", tokenizer=TOKENIZER, limits=LIMITS)
    with pytest.raises(ServingError, match="'other' is not served, 'm' is") as error:
        await checked(model="other")
    assert error.value.reason is Reason.UNKNOWN_MODEL
    assert await checked(model="m")


def test_the_limits_that_are_told_are_those_that_are_held():
    limits = request_limits()
    assert (limits.max_choices, limits.max_logprobs) == (16, 20)
    assert (limits.max_stop_strings, limits.max_stop_string_bytes) == (16, 256)
    assert (limits.max_stop_token_ids, limits.max_logit_bias) == (64, 300)
    assert limits.max_message_bytes == 4 * 2**20


async def test_what_is_not_asked_for_has_its_default():
    request = await checked()
    assert request.token_ids == PROMPT
    # Cut to what the context of 100 leaves after 5; 256 where there is more.
    assert request.stop.max_tokens == 95
    roomy = ServedLimits(model="m", vocab_size=VOCAB_SIZE, max_model_len=1000)
    assert (await checked(limits=roomy)).stop.max_tokens == 256
    assert (request.num_choices, request.priority, request.tenant) == (1, 0, "")
    assert (request.num_logprobs, request.num_prompt_logprobs) == (None, None)
    # None is not asked for; 0 is the chosen token's alone.
    zero = await checked(logprobs=0, prompt_logprobs=0)
    assert (zero.num_logprobs, zero.num_prompt_logprobs) == (0, 0)


async def test_a_seed_is_drawn_unless_it_is_given():
    first, second = await checked(), await checked()
    assert first.seed != second.seed
    assert (await checked(sampling=SAMPLING(seed=0))).seed == 0
    assert (await checked(sampling=SAMPLING(seed=2**64 - 1))).seed == 2**64 - 1


async def test_text_is_tokenized():
    assert (await checked(text="hé")).token_ids == (ord("h"), 0xC3, 0xA9)


async def test_what_is_needed_is_what_is_left():
    request = await checked(stop=STOP(max_tokens=20), n=3)
    assert request.need(answers(b"", b"", b"")) == Need(
        num_prompt_tokens=5, max_num_tokens=25, num_choices=3
    )
    # The prompt is computed once, and each choice goes on from it.
    assert request.need(answers(b"ab", b"c")) == Need(
        num_prompt_tokens=5, max_num_tokens=25, num_choices=2
    )
    assert request.need(answers(b"ab")) == Need(num_prompt_tokens=7, max_num_tokens=25)


LAYOUT = KvLayout(
    model="m",
    model_digest="00",
    dtype="float32",
    block_size=2,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


async def test_what_may_be_cached_is_the_prompt_and_what_its_only_answer_has_generated():
    request = await checked(stop=STOP(max_tokens=20))
    salt = tenant_salt("", is_shared=False)

    def hashes(*token_ids: int) -> list[int]:
        return list(map(short_hash, prompt_chain(token_ids, LAYOUT, salt=salt).hashes))

    assert list(request.need(answers(b"")).block_hashes(LAYOUT)) == hashes(*PROMPT)
    assert list(request.need(answers(b"", b"")).block_hashes(LAYOUT)) == hashes(*PROMPT)
    longer = request.need(answers(b"ab")).block_hashes(LAYOUT)
    assert list(longer) == hashes(*PROMPT, *b"ab")
    assert len(longer) == 3


async def test_prompt_logprobs_are_computed_whatever_is_cached():
    request = await checked(stop=STOP(max_tokens=20), prompt_logprobs=0)
    assert list(request.need(answers(b"")).block_hashes(LAYOUT)) == []


async def test_a_shared_cache_has_no_salt():
    request = await check_request(
        client_request(tenant="t"),
        request_id="r",
        tokenizer=TOKENIZER,
        limits=LIMITS,
        shares_cache=True,
    )
    (spec,) = read_back(request, answers(b""))
    assert (spec.tenant, spec.cache_salt) == ("t", b"")


def read_back(request: CheckedRequest, left: list[Answer]) -> list[GenerationSpec]:
    """What a node makes of the request, going on from the answers that are left."""
    sent = request.to_sequence(left, model="m", age_s=1.5, attempt=2, scores_prompt=True)
    sequence = types_pb2.Sequence.FromString(sent.SerializeToString())
    spec = read_sequence(sequence, model="m", vocab_size=VOCAB_SIZE, max_model_len=100)
    return read_choices(sequence, spec, vocab_size=VOCAB_SIZE)


async def test_nodes_read_the_request_as_it_was_checked():
    request = await checked(
        request_id="my request",
        sampling=SAMPLING(temperature=0.5, top_k=7, seed=2**63 + 1, logit_bias={9: 1.5, 3: -1.0}),
        stop=STOP(
            max_tokens=20,
            stop_strings=["end"],
            stop_token_ids=[8, 9],
            ignore_eos=True,
            min_tokens=2,
        ),
        logprobs=0,
        prompt_logprobs=4,
        priority=-3,
        tenant="t",
    )
    assert read_back(request, answers(b"")) == [
        GenerationSpec(
            request_id="my request",
            token_ids=PROMPT,
            num_prompt_tokens=5,
            sampling=SamplingParams(temperature=0.5, top_k=7, logit_bias=((3, -1.0), (9, 1.5))),
            stop=StopConditions(
                max_tokens=20, stop_token_ids=frozenset({8, 9}), ignore_eos=True, min_tokens=2
            ),
            seed=2**63 + 1,
            num_logprobs=0,
            num_prompt_logprobs=4,
            priority=-3,
            tenant="t",
            cache_salt=tenant_salt("t", is_shared=False),
            age_s=1.5,
        )
    ]


@pytest.mark.parametrize(
    ("generated", "choices"),
    [
        ([b""], [0]),
        ([b"ab"], [0]),
        # The others have ended.
        ([b""], [2]),
        ([b"abc"], [2]),
        ([b"", b"", b""], [0, 1, 2]),
        ([b"a", b"", b"bcd"], [0, 1, 2]),
        ([b"ab", b"c"], [0, 2]),
        ([b"ab", b""], [1, 2]),
    ],
)
async def test_each_choice_goes_on_as_itself_from_its_own_tokens(generated, choices):
    request = await checked(n=3, stop=STOP(max_tokens=20))
    specs = read_back(request, answers(*generated, choices=tuple(choices)))
    assert [spec.choice for spec in specs] == choices
    assert [spec.token_ids for spec in specs] == [(*PROMPT, *tokens) for tokens in generated]
    # The same end and the same randomness as if nothing had happened.
    assert {spec.num_prompt_tokens for spec in specs} == {5}
    assert {spec.max_num_tokens for spec in specs} == {25}
    assert {spec.seed for spec in specs} == {request.seed}


async def test_the_attempt_and_what_is_still_to_be_scored_are_told():
    request = await checked(prompt_logprobs=2)

    def sequence(*, attempt: int, scores_prompt: bool) -> types_pb2.Sequence:
        left = answers(b"a")
        return request.to_sequence(
            left, model="m", age_s=0.0, attempt=attempt, scores_prompt=scores_prompt
        )

    first = sequence(attempt=0, scores_prompt=True)
    assert (first.attempt, first.num_prompt_logprobs, first.num_prompt_tokens) == (0, 2, 5)
    again = sequence(attempt=3, scores_prompt=False)
    assert (again.attempt, again.HasField("num_prompt_logprobs")) == (3, False)
    # One choice, the first: its tokens are the sequence's.
    assert (again.num_choices, len(again.choices), len(again.token_ids)) == (1, 0, 4 * 6)
