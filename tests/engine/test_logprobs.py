"""Log-probabilities of drawn and of prompt tokens: exact, ordered, and the same however cut."""

import math
import random
from pathlib import Path

import pytest
import torch

from engine import logprobs
from engine.executor import Draw, Row, Scoring, StepPlan, TokenLogprobs
from engine.logprobs import token_logprobs
from engine.sequence import GenerationSpec, SamplingParams, StopConditions
from tests.engine.executors import EXACT_KINDS, KINDS, make_executor
from tests.engine.scheduled import logprobs_of, prompt_logprobs_of, run_specs, tokens_of
from tests.models import VOCAB_SIZE, make_tiny_model, reference_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def random_tokens(num_tokens: int, *, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens))


def scored_spec(
    num_prompt_tokens: int, *, max_tokens: int = 3, num_top: int | None = 4, **params: object
) -> GenerationSpec:
    return GenerationSpec(
        request_id="r",
        token_ids=random_tokens(num_prompt_tokens, seed=num_prompt_tokens),
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        seed=3,
        num_logprobs=num_top,
        num_prompt_logprobs=num_top,
    )


def test_by_hand_with_equal_ones_in_the_order_of_ids() -> None:
    logits_BV = torch.tensor([[0.25, 0.125, 0.25, 0.125, 0.25]]).log()
    (found,) = token_logprobs(logits_BV, [3], num_top=[4])
    assert found.chosen == pytest.approx(math.log(0.125))
    assert [token for token, _ in found.top] == [0, 2, 4, 1]
    assert [value for _, value in found.top] == pytest.approx(
        [math.log(0.25)] * 3 + [math.log(0.125)]
    )


@pytest.mark.parametrize("num_tokens", [1, 7, 259, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_top_ones_are_those_of_a_stable_sort(
    num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of few rows too; values are multiples of 1/4 or so: many are equal."""
    monkeypatch.setattr(logprobs, "_MAX_ELEMENTS", 3 * num_tokens)
    logits_BV = torch.randn(8, num_tokens, generator=torch.Generator().manual_seed(0))
    logits_BV = ((4 * logits_BV).round() / 4).to(dtype)
    expected_BV = logits_BV.float().log_softmax(dim=-1)
    values_BV, ids_BV = expected_BV.sort(dim=-1, descending=True, stable=True)
    chosen = [row % num_tokens for row in range(8)]
    counts = [0, 1, 2, 20, 20, 0, 5, 20]
    found = token_logprobs(logits_BV, chosen, num_top=counts)
    for row, count in enumerate(counts):
        assert found[row].chosen == float(expected_BV[row, chosen[row]])
        ids, values = ids_BV[row, :count].tolist(), values_BV[row, :count].tolist()
        assert found[row].top == tuple(zip(ids, values, strict=True))


def test_a_certain_token_has_zero_and_the_impossible_minus_infinity() -> None:
    logits_BV = torch.tensor([[0.0, -math.inf, -math.inf]])
    (found,) = token_logprobs(logits_BV, [0], num_top=[3])
    assert found == TokenLogprobs(chosen=0.0, top=((0, 0.0), (1, -math.inf), (2, -math.inf)))


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(ValueError, match="NaN"):
        token_logprobs(torch.tensor([[0.0, math.nan]]), [0], num_top=[1])


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_prompt_and_output_have_the_log_probabilities_of_transformers(
    llama: Path, kind: str
) -> None:
    """Those of the raw logits, whatever bends the draw."""
    bent = {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.4, "logit_bias": ((7, 9.0),)}
    specs = [scored_spec(length, **bent) for length in (1, 2, 5, 61)]
    model = reference_model(llama)
    runs = run_specs(make_executor(llama, kind), specs, chunk=13)
    for spec, progress in zip(specs, runs, strict=True):
        tokens = [*spec.token_ids, *tokens_of(progress)]
        with torch.inference_mode():
            expected_TV = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(dim=-1)
        found = prompt_logprobs_of(progress) + logprobs_of(progress)
        assert len(found) == len(tokens) - 1
        for row_V, token, ours in zip(expected_TV, tokens[1:], found, strict=True):
            assert ours.chosen == pytest.approx(float(row_V[token]), abs=1e-3)
            top = row_V.topk(4)
            assert [id for id, _ in ours.top] == top.indices.tolist()
            assert [value for _, value in ours.top] == pytest.approx(top.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("chunk", [5, 13, 1000])
def test_native_scores_are_the_same_bits_in_any_batch_and_chunk(llama: Path, chunk: int) -> None:
    specs = [scored_spec(length) for length in (1, 2, 5, 123, 489)]
    specs.insert(2, scored_spec(77, num_top=None))
    together = run_specs(make_executor(llama, "native"), specs, chunk=chunk)
    for spec, progress in zip(specs, together, strict=True):
        (alone,) = run_specs(make_executor(llama, "native", block_size=16), [spec])
        assert tokens_of(progress) == tokens_of(alone)
        assert logprobs_of(progress) == logprobs_of(alone)
        assert prompt_logprobs_of(progress) == prompt_logprobs_of(alone)
        num_scored = 0 if spec.num_logprobs is None else spec.num_prompt_tokens - 1
        assert len(prompt_logprobs_of(progress)) == num_scored


def test_native_scores_are_close_to_those_of_float32(llama: Path) -> None:
    spec = scored_spec(61)
    ours, exact = (
        prompt_logprobs_of(run_specs(make_executor(llama, kind), [spec])[0])
        for kind in ("native", "torch")
    )
    errors = [abs(a.chosen - b.chosen) for a, b in zip(ours, exact, strict=True)]
    # Of logits whose standard deviation is about 3, in bfloat16.
    assert max(errors) < 1
    assert sum(errors) / len(errors) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_rows_answer_for_themselves_in_a_step_of_all_kinds(llama: Path, kind: str) -> None:
    """A scored chunk that draws nothing, one that draws, one whose tail is not scored, and plain
    rows; the last one's ban is not seen in its log-probability."""
    executor = make_executor(llama, kind)
    prompt = random_tokens(9, seed=1)
    plain = Draw(sampling=SamplingParams(), seed=0, choice=0, position=9)

    def row(block: int, draw: Draw | None, scoring: Scoring | None, num_tokens: int = 9) -> Row:
        table = (2 * block, 2 * block + 1)
        return Row(
            token_ids=prompt[:num_tokens], start=0, block_table=table, draw=draw, scoring=scoring
        )

    every = Scoring(token_ids=(*prompt[1:], 5), num_logprobs=2)
    (best,) = executor.execute(StepPlan(rows=(row(0, plain, None),))).token_ids
    assert best is not None
    asking = Draw(
        sampling=SamplingParams(),
        seed=0,
        choice=0,
        position=9,
        banned_token_ids=frozenset({best}),
        num_logprobs=1,
    )
    result = executor.execute(
        StepPlan(
            rows=(
                row(0, None, every),
                row(1, plain, None),
                row(2, plain, Scoring(token_ids=prompt[1:], num_logprobs=1)),
                row(3, None, None, 4),
                row(4, asking, Scoring(token_ids=prompt[1:3], num_logprobs=0)),
            )
        )
    )
    assert result.token_ids[:4] == (None, best, best, None)
    assert result.token_ids[4] not in (None, best)
    assert result.logprobs[:4] == (None,) * 4
    asked = result.logprobs[4]
    assert asked is not None
    assert asked.top[0][0] == best
    assert asked.chosen < asked.top[0][1]
    first, nothing, third, none, last = result.prompt_logprobs
    assert first is not None and third is not None and last is not None
    assert (nothing, none) == (None, None)
    assert [run.position for run in (first, third, last)] == [1, 1, 1]
    assert [len(run.tokens) for run in (first, third, last)] == [9, 8, 2]
    # After the whole prompt, the likeliest token is the one that is drawn there.
    assert first.tokens[8].top[0][0] == best
    tolerance = 0 if kind == "native" else 1e-4
    for ours, theirs in zip(first.tokens, third.tokens, strict=False):
        assert ours.chosen == pytest.approx(theirs.chosen, abs=tolerance)
        assert len(theirs.top) == 1
        assert ours.top[0][0] == theirs.top[0][0]
    assert all(token.top == () for token in last.tokens)
