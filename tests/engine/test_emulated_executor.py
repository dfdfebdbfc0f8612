"""What an emulated model makes up, so that emulated clusters answer every kind of request."""

import json
from pathlib import Path

import pytest

from engine.emulated_executor import (
    EmulatedExecutor,
    emulated_layout,
    made_up_logprobs,
    next_token,
    pack_tokens,
)
from engine.executor import Draw, TokenLogprobs
from engine.sequence import GenerationSpec, SamplingParams, StopConditions
from kvtransfer.memory import HostMemory
from tests.engine.scheduled import logprobs_of, prompt_logprobs_of, run_specs, tokens_of

FREE = dict.fromkeys(
    ("base_ms", "decode_row_ms", "prefill_token_ms", "decode_context_ms", "prefill_context_ms"), 0
)
BENT = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias=((1, 100.0),))


@pytest.fixture
def executor(tmp_path: Path) -> EmulatedExecutor:
    config = {"vocab_size": 10, "cost_profile": FREE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    memory = HostMemory(emulated_layout(model="m", block_size=4), 32)
    return EmulatedExecutor(folder=tmp_path, memory=memory)


def test_the_drawn_token_is_the_likeliest_and_the_next_ids_follow() -> None:
    assert made_up_logprobs(8, num_logprobs=3, vocab_size=10) == TokenLogprobs(
        chosen=-1.0, top=((8, -1.0), (9, -2.0), (0, -3.0))
    )
    assert made_up_logprobs(1, num_logprobs=20, vocab_size=2).top == ((1, -1.0), (0, -2.0))
    assert made_up_logprobs(1, num_logprobs=0, vocab_size=2).top == ()


@pytest.mark.parametrize("chunk", [4, 1000])
def test_prompt_and_output_get_theirs_and_bias_and_penalties_change_nothing(
    executor: EmulatedExecutor, chunk: int
) -> None:
    spec = GenerationSpec(
        request_id="r",
        token_ids=(1, 2, 3, 4, 5, 6),
        num_prompt_tokens=6,
        sampling=BENT,
        stop=StopConditions(max_tokens=3, min_tokens=3, stop_token_ids=frozenset({0, 5})),
        num_logprobs=2,
        num_prompt_logprobs=1,
    )
    (progress,) = run_specs(executor, [spec], chunk=chunk)
    tokens = list(spec.token_ids)
    for position in range(6, 9):
        draw = Draw(
            sampling=SamplingParams(),
            seed=0,
            choice=0,
            position=position,
            banned_token_ids=frozenset({0, 5}),
        )
        tokens.append(next_token(pack_tokens(tokens), draw=draw, vocab_size=10))
    assert tokens_of(progress) == tokens[6:]
    assert logprobs_of(progress) == [
        made_up_logprobs(token, num_logprobs=2, vocab_size=10) for token in tokens[6:]
    ]
    assert prompt_logprobs_of(progress) == [
        made_up_logprobs(token, num_logprobs=1, vocab_size=10) for token in (2, 3, 4, 5, 6)
    ]
