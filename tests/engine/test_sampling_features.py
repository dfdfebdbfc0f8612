"""Whole generations with bias, penalties and stop conditions, on every executor."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from engine.executor import Executor
from engine.scheduler import Progress
from engine.sequence import GenerationSpec, SamplingParams, StopConditions
from tests.engine.executors import EXACT_KINDS, KINDS, make_executor
from tests.engine.scheduled import run_specs, tokens_of
from tests.models import EOS, VOCAB_SIZE, make_tiny_model, reference_model

BENT = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "logit_bias": ((3, 4.0), (50, -2.0)),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def make_spec(
    num_prompt_tokens: int, *, max_tokens: int, seed: int = 0, stop: Any = None, **params: Any
) -> GenerationSpec:
    tokens = random.Random(num_prompt_tokens).choices(range(VOCAB_SIZE), k=num_prompt_tokens)
    return GenerationSpec(
        request_id="r",
        token_ids=tuple(tokens),
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(**params),
        stop=StopConditions(
            max_tokens=max_tokens, **({"ignore_eos": True} if stop is None else stop)
        ),
        seed=seed,
    )


def forced(first: int, **stop: Any) -> GenerationSpec:
    """Draws first at every position, as long as it may."""
    return make_spec(
        5, stop=stop, logit_bias=((first, 100.0),), max_tokens=stop.pop("max_tokens", 4)
    )


def run_one(executor: Executor, spec: GenerationSpec) -> list[Progress]:
    (progress,) = run_specs(executor, [spec])
    return [event for event in progress if event.token_id is not None]


def bent_reference(model: Any, spec: GenerationSpec) -> list[int]:
    """Greedy, with transformers' processors, and OpenAI's two penalties written out."""
    sampling, tokens = spec.sampling, list(spec.token_ids)
    bias = SequenceBiasLogitsProcessor({(token,): value for token, value in sampling.logit_bias})
    repetition = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    while len(tokens) < spec.max_num_tokens:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            scores = repetition(ids, bias(ids, model(ids).logits[:, -1]))[0]
        output = tokens[spec.num_prompt_tokens :]
        for token in set(output):
            scores[token] -= sampling.presence_penalty
            scores[token] -= sampling.frequency_penalty * output.count(token)
        tokens.append(int(scores.argmax()))
    return tokens[spec.num_prompt_tokens :]


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_bent_greedy_tokens_are_those_of_transformers(llama: Path, kind: str) -> None:
    """In one batch, with plain ones, in chunks."""
    bent = [make_spec(length, max_tokens=12, **BENT) for length in (1, 5, 23, 61)]
    plain = [make_spec(length, max_tokens=12) for length in (4, 6)]
    runs = run_specs(make_executor(llama, kind), [*bent, *plain], chunk=9)
    model = reference_model(llama)
    expected = [bent_reference(model, spec) for spec in bent]
    plain_expected = [
        bent_reference(model, replace(spec, sampling=SamplingParams(logit_bias=((0, 0.0),))))
        for spec in plain
    ]
    assert [tokens_of(run) for run in runs] == expected + plain_expected
    assert expected[0] != bent_reference(
        model, replace(bent[0], sampling=SamplingParams(logit_bias=((0, 0.0),)))
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_request_has_the_same_tokens_alone_chunked_and_resumed(
    llama: Path, kind: str, temperature: float
) -> None:
    specs = [
        make_spec(length, max_tokens=12, seed=length, temperature=temperature, **BENT)
        for length in (1, 6, 40)
    ]
    specs.append(make_spec(7, max_tokens=12, temperature=temperature))
    alone = [tokens_of(run_specs(make_executor(llama, kind), [spec])[0]) for spec in specs]
    together = run_specs(make_executor(llama, kind), specs, chunk=11)
    assert [tokens_of(run) for run in together] == alone
    for spec, tokens in zip(specs, alone, strict=True):
        resumed = replace(spec, token_ids=(*spec.token_ids, *tokens[:5]))
        (run,) = run_specs(make_executor(llama, kind), [resumed], chunk=11)
        assert tokens_of(run) == tokens[5:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_sequence_may_be_the_first_token(llama: Path, kind: str) -> None:
    executor = make_executor(llama, kind)
    assert executor.eos_token_ids == {EOS}
    (event,) = run_one(executor, forced(EOS))
    assert (event.token_id, event.position, event.reason, event.left) == (EOS, 5, "eos", True)
    ignored = run_one(executor, forced(EOS, ignore_eos=True))
    assert [event.token_id for event in ignored] == [EOS] * 4
    assert [event.reason for event in ignored] == ["", "", "", "length"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_generation_of_one_or_two_tokens_has_as_many(
    llama: Path, kind: str, max_tokens: int
) -> None:
    executor = make_executor(llama, kind)
    events = run_one(executor, forced(65, max_tokens=max_tokens))
    assert [event.reason for event in events] == ["", "length"][-max_tokens:]
    # A stop at the last position is a stop, not the length.
    events = run_one(executor, forced(65, max_tokens=1, stop_token_ids=frozenset({65})))
    assert [event.reason for event in events] == ["stop"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop_token", [65, EOS])
def test_a_stop_token_is_drawn_when_min_tokens_are_out_and_not_before(
    llama: Path, kind: str, stop_token: int
) -> None:
    stop_ids = frozenset() if stop_token == EOS else frozenset({stop_token})
    events = run_one(
        make_executor(llama, kind),
        forced(stop_token, max_tokens=9, min_tokens=3, stop_token_ids=stop_ids),
    )
    assert [event.token_id == stop_token for event in events] == [False, False, False, True]
    assert events[-1].reason == ("eos" if stop_token == EOS else "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_min_tokens_above_max_tokens_ends_by_length(llama: Path, kind: str) -> None:
    events = run_one(make_executor(llama, kind), forced(EOS, max_tokens=2, min_tokens=9))
    assert len(events) == 2
    assert EOS not in [event.token_id for event in events]
    assert events[-1].reason == "length"
