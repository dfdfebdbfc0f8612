"""What a request can ask for, served split and whole, against transformers' own computation."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from coordinator.client import AsyncClient
from coordinator.supervisor import Cluster
from protos.errors import read_error
from protos.pd.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from protos.serving import dial
from tests.e2e.serving import NEAR_TIE, predicted, wait_all_available
from tests.models import EOS, make_tiny_model, reference_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
OPTIONS = {"dtype": "float32", "block_size": 4, "step_budget_ms": 0.5, "kv_memory_gb": 0.05}
PROMPTS = [[(7 * i + n) % 256 for i in range(n)] for n in (1, 4, 5, 33)]
NUM_TOKENS = 12


@dataclass
class Answer:
    """All that one call brought, by choice."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finished: Any = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return reference_model(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 0], ids=["split", "whole"])
async def address(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[str]:
    async with Cluster(
        model=str(folder),
        num_prefill=request.param,
        num_decode=1,
        node_options=OPTIONS,
        coordinator_options={"local_prefill": "never"},
    ) as cluster:
        yield cluster.address
        async with AsyncClient(cluster.address) as client, asyncio.timeout(5):
            await wait_all_available(client)


async def ask(address: str, prompt: list[int] | str, **fields: Any) -> Answer:
    """One Generate call; fields of sampling and stop by their names."""
    request = generation_pb2.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    bias = fields.pop("logit_bias", {})
    for name, value in fields.items():
        for part in (request.sampling, request.stop, request):
            if name in part.DESCRIPTOR.fields_by_name:
                if isinstance(value, list):
                    getattr(part, name).extend(value)
                else:
                    setattr(part, name, value)
    for token_id, value in bias.items():
        request.sampling.logit_bias[token_id] = value
    answer = Answer()
    async with dial(address, purpose="test") as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=30)
        async for response in call:
            match response.WhichOneof("event"):
                case "delta":
                    delta = response.delta
                    answer.token_ids.setdefault(delta.choice, []).extend(delta.token_ids)
                    answer.logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
                    answer.text[delta.choice] = answer.text.get(delta.choice, "") + delta.text
                case "prompt_logprobs":
                    got = response.prompt_logprobs
                    assert got.position == len(answer.prompt_logprobs) + 1
                    answer.prompt_logprobs.extend(got.positions)
                case "finished":
                    answer.finished = response.finished
    return answer


def logits_after(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def greedy(model: Any, prompt: list[int], *processors: Any, num_tokens: int = NUM_TOKENS):
    """Token ids, and the gap of the two best scores at each."""
    token_ids, gaps = list(prompt), []
    for _ in range(num_tokens):
        scores = logits_after(model, token_ids)[-1:]
        for processor in processors:
            scores = processor(torch.tensor([token_ids]), scores)
        best, second = scores[0].topk(2).values.tolist()
        gaps.append(best - second)
        token_ids.append(int(scores[0].argmax()))
    return token_ids[len(prompt) :], gaps


def assert_same(got: list[int], want: list[int], gaps: list[float]) -> None:
    """Equal, or first different at a near tie."""
    for one, other, gap in zip(got, want, gaps, strict=True):
        if one != other:
            assert gap < NEAR_TIE
            return


class CountPenalties:
    """OpenAI's presence and frequency penalties, over the output."""

    def __init__(self, num_prompt: int, *, presence: float, frequency: float) -> None:
        self.num_prompt, self.presence, self.frequency = num_prompt, presence, frequency

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(token_ids[0, self.num_prompt :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_penalties_and_bias_draw_what_transformers_processors_do(address, reference, prompt):
    biased = {7: 5.0, 200: -4.0}
    processors = [
        SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biased.items()]),
        RepetitionPenaltyLogitsProcessor(1.3),
        CountPenalties(len(prompt), presence=0.5, frequency=0.25),
    ]
    answer = await ask(
        address,
        prompt,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=biased,
    )
    assert_same(answer.token_ids[0], *greedy(reference, prompt, *processors))


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_logprobs_of_every_token_and_of_the_prompt(address, reference, prompt):
    answer = await ask(
        address, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    tokens = prompt + answer.token_ids[0]
    logprobs_TV = logits_after(reference, tokens).log_softmax(dim=-1)
    expected = [
        (token, float(logprobs_TV[position, token])) for position, token in enumerate(tokens[1:])
    ]
    told = [*answer.prompt_logprobs, *answer.logprobs[0]]
    assert len(answer.prompt_logprobs) == len(prompt) - 1
    assert [(one.chosen.token_id, one.chosen.logprob) for one in told] == [
        (token, pytest.approx(logprob, abs=1e-3)) for token, logprob in expected
    ]
    for position, one in enumerate(told):
        k = 2 if position < len(prompt) - 1 else 3
        top = logprobs_TV[position].topk(k).values.tolist()
        assert [other.logprob for other in one.top] == pytest.approx(top, abs=1e-3)


async def test_several_choices_come_from_one_prefill_each_with_a_seed_of_its_own(address):
    prompt = PROMPTS[2]
    sample = {"temperature": 1.0, "seed": 11, "max_tokens": 9, "ignore_eos": True}
    together = await ask(address, prompt, n=4, **sample)
    assert sorted(together.token_ids) == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in together.token_ids.values()}) > 1
    assert together.finished.usage.prompt_tokens == 5
    assert together.finished.usage.generated_tokens == 36
    alone = await ask(address, prompt, **sample)
    assert alone.token_ids[0] == together.token_ids[0]
    greedily = await ask(address, prompt, n=3, max_tokens=9, ignore_eos=True)
    assert greedily.token_ids[0] == greedily.token_ids[1] == greedily.token_ids[2]


@pytest.mark.parametrize("num_chars", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 1, 4])
async def test_a_stop_string_ends_the_answer_wherever_it_is(address, start, num_chars):
    """Also in the first token, across the handoff and across tokens."""
    whole = await ask(address, PROMPTS[3], max_tokens=NUM_TOKENS, ignore_eos=True)
    text = whole.text[0]
    stop = text[start : start + num_chars]
    answer = await ask(
        address, PROMPTS[3], max_tokens=NUM_TOKENS, ignore_eos=True, stop_strings=["never", stop]
    )
    assert answer.text[0] == text[: text.index(stop)]
    (choice,) = answer.finished.choices
    assert (choice.reason, choice.stop_string) == (types_pb2.FINISH_REASON_STOP, stop)
    assert answer.finished.usage.generated_tokens == len(answer.token_ids[0])
    assert whole.token_ids[0][: len(answer.token_ids[0])] == answer.token_ids[0]


async def test_a_stop_string_is_passed_by_before_min_tokens(address):
    whole = await ask(address, PROMPTS[3], max_tokens=NUM_TOKENS, ignore_eos=True)
    stop = whole.text[0][1]
    answer = await ask(
        address,
        PROMPTS[3],
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        stop_strings=[stop],
        min_tokens=NUM_TOKENS,
    )
    assert answer.token_ids == whole.token_ids
    assert answer.finished.choices[0].reason == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_few_tokens(address, reference, max_tokens):
    answer = await ask(address, PROMPTS[1], max_tokens=max_tokens, ignore_eos=True)
    expected, gaps = greedy(reference, PROMPTS[1], num_tokens=max_tokens)
    assert_same(answer.token_ids[0], expected, gaps)
    assert answer.finished.choices[0].reason == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_an_end_of_sequence_as_the_first_token_is_a_whole_answer(address, num_choices):
    answer = await ask(address, PROMPTS[1], n=num_choices, max_tokens=5, logit_bias={EOS: 100.0})
    for choice in range(num_choices):
        assert answer.token_ids[choice] == [EOS]
        assert answer.text[choice] == ""
        assert answer.finished.choices[choice].reason == types_pb2.FINISH_REASON_EOS
    held = await ask(address, PROMPTS[1], max_tokens=5, min_tokens=3, logit_bias={EOS: 100.0})
    assert held.token_ids[0][-1] == EOS
    assert len(held.token_ids[0]) == 4


async def test_a_request_id_that_runs_is_refused_and_explain_tells_its_story(address):
    async with dial(address, purpose="test") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            request_id="mine",
            token_ids=generation_pb2.TokenIds(ids=[1, 2]),
            stop=types_pb2.StopConditions(max_tokens=400, ignore_eos=True),
        )
        call = stub.Generate(request, timeout=30)
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(request, timeout=30).read()
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert read_error(error.value).metadata["field"] == "request_id"
        story = await stub.Explain(generation_pb2.ExplainRequest(request_id="mine"), timeout=5)
        assert story.is_running
        call.cancel()
        assert [event.what for event in story.events][:4] == [
            *("arrived", "queued", "paired", "reserved")
        ]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Explain(generation_pb2.ExplainRequest(request_id="other"), timeout=5)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_five_requests_that_need_two_fifths_of_the_pool_each_all_finish():
    """The pool has 25 blocks of 16 tokens; each request ends with 10 of them."""
    async with (
        Cluster(
            model="emulated",
            num_prefill=1,
            num_decode=1,
            node_options={"kv_memory_gb": 25 * 64e-9},
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        prompts = [[value] * 20 for value in range(1, 6)]
        answers = await asyncio.gather(
            *(ask(cluster.address, prompt, max_tokens=139) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids[0] == predicted(prompt, 139)
        assert sum(answer.finished.num_restarts for answer in answers) > 0
        await wait_all_available(client)


async def test_choices_of_an_emulated_model_are_what_the_rule_says_of_each():
    async with Cluster(model="emulated", num_prefill=1, num_decode=1) as cluster:
        answer = await ask(cluster.address, [5] * 21, n=5, temperature=1.0, seed=3, max_tokens=30)
        for choice in range(5):
            assert answer.token_ids[choice] == predicted([5] * 21, 30, seed=3, choice=choice)
