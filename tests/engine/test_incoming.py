"""What a node believes of a request that reaches it: nothing that it did not check."""

import math
import struct

import pytest

from engine.incoming import read_sampling, read_sequence
from engine.sequence import SamplingParams
from protos.errors import Reason, ServingError
from protos.pd.v1 import types_pb2


def sequence(**changes: object) -> types_pb2.Sequence:
    fields = {
        "request_id": "r",
        "token_ids": struct.pack("<3i", 1, 2, 3),
        "num_prompt_tokens": 3,
        "model": "m",
        "seed": 5,
        "stop": types_pb2.StopConditions(max_tokens=4, stop_token_ids=[7]),
        "sampling": types_pb2.SamplingParams(temperature=0.5, top_k=9),
    }
    return types_pb2.Sequence(**(fields | changes))


def read(message: types_pb2.Sequence):
    return read_sequence(message, model="m", vocab_size=10, max_model_len=8)


def test_a_good_sequence_is_read_whole():
    spec = read(sequence())
    assert spec.token_ids == (1, 2, 3)
    assert (spec.sampling.temperature, spec.sampling.top_k, spec.sampling.top_p) == (0.5, 9, 1.0)
    assert (spec.stop.max_tokens, spec.stop.stop_token_ids) == (4, {7})
    assert (spec.seed, spec.max_num_tokens) == (5, 7)


def test_a_resumed_sequence_keeps_prompt_and_output_apart():
    spec = read(sequence(num_prompt_tokens=2))
    assert (spec.num_prompt_tokens, spec.max_num_tokens) == (2, 6)


@pytest.mark.parametrize(
    ("changes", "reason", "named"),
    [
        ({"model": "other"}, Reason.UNKNOWN_MODEL, "m"),
        ({"token_ids": b""}, Reason.INVALID_ARGUMENT, "token_ids"),
        ({"token_ids": b"12345"}, Reason.INVALID_ARGUMENT, "token_ids"),
        ({"token_ids": struct.pack("<3i", 1, 2, 10)}, Reason.INVALID_ARGUMENT, "0..9"),
        ({"token_ids": struct.pack("<3i", 1, 2, -1)}, Reason.INVALID_ARGUMENT, "0..9"),
        ({"num_prompt_tokens": 0}, Reason.INVALID_ARGUMENT, "num_prompt_tokens"),
        ({"num_prompt_tokens": 4}, Reason.INVALID_ARGUMENT, "num_prompt_tokens"),
        ({"stop": types_pb2.StopConditions()}, Reason.INVALID_ARGUMENT, "max_tokens"),
        ({"stop": types_pb2.StopConditions(max_tokens=6)}, Reason.CONTEXT_TOO_LONG, "8"),
        (
            {"num_prompt_tokens": 1, "stop": types_pb2.StopConditions(max_tokens=2)},
            Reason.INVALID_ARGUMENT,
            "nothing is left",
        ),
        (
            {"num_logprobs": 21},
            Reason.INVALID_ARGUMENT,
            "21 is above the limit of 20",
        ),
        ({"num_prompt_logprobs": 21}, Reason.INVALID_ARGUMENT, "num_prompt_logprobs"),
        (
            {"stop": types_pb2.StopConditions(max_tokens=4, stop_token_ids=[10])},
            Reason.INVALID_ARGUMENT,
            "stop.stop_token_ids: ids are not in 0..9",
        ),
        (
            {"sampling": types_pb2.SamplingParams(min_p=1.5)},
            Reason.INVALID_ARGUMENT,
            "min_p",
        ),
    ],
)
def test_a_bad_sequence_is_refused_by_name(changes, reason, named):
    with pytest.raises(ServingError) as error:
        read(sequence(**changes))
    assert error.value.reason is reason
    assert named in error.value.message


def sampling(**fields: object) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(**fields)


def test_what_is_not_set_is_neutral():
    spec = read(sequence(sampling=sampling()))
    assert spec.sampling == SamplingParams()
    assert not spec.sampling.has_penalties
    assert (spec.num_logprobs, spec.num_prompt_logprobs) == (None, None)
    assert (spec.priority, spec.tenant, spec.age_s) == (0, "", 0.0)


def test_every_way_to_bend_a_draw_is_read():
    bent = sampling(
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={9: -100.0, 0: 0.5},
    )
    spec = read(sequence(sampling=bent))
    assert spec.sampling == SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((0, 0.5), (9, -100.0)),
    )
    assert spec.sampling.has_penalties
    assert hash(spec.sampling) == hash(read(sequence(sampling=bent)).sampling)


def test_a_bias_alone_is_no_penalty():
    assert not read(sequence(sampling=sampling(logit_bias={3: 1.0}))).sampling.has_penalties


def test_log_probabilities_and_the_place_in_line_are_read():
    message = sequence(num_logprobs=0, num_prompt_logprobs=20, priority=-3, tenant="t")
    message.age.FromMilliseconds(1500)
    spec = read(message)
    assert (spec.num_logprobs, spec.num_prompt_logprobs) == (0, 20)
    assert (spec.priority, spec.tenant, spec.age_s) == (-3, "t", 1.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0 is not in (0, 100]"),
        ({"repetition_penalty": 100.5}, "repetition_penalty: 100.5 is not in (0, 100]"),
        ({"repetition_penalty": math.nan}, "repetition_penalty: nan is not in (0, 100]"),
        ({"presence_penalty": 2.5}, "presence_penalty: 2.5 is not in [-2, 2]"),
        ({"presence_penalty": -math.inf}, "presence_penalty: -inf is not in [-2, 2]"),
        ({"frequency_penalty": -2.5}, "frequency_penalty: -2.5 is not in [-2, 2]"),
        ({"logit_bias": {3: 100.5}}, "logit_bias: 100.5 is not in [-100, 100]"),
        ({"logit_bias": {3: math.nan}}, "logit_bias: nan is not in [-100, 100]"),
        ({"logit_bias": {500: 0.0}}, "logit_bias: ids are not in 0..499"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias: has more than 300 entries"),
    ],
)
def test_sampling_out_of_range_is_refused_with_the_range(fields, message):
    with pytest.raises(ServingError) as error:
        read_sampling(sampling(**fields), vocab_size=500)
    assert error.value.reason is Reason.INVALID_ARGUMENT
    assert error.value.message == f"sampling.{message}"


def test_as_much_bias_as_is_allowed_is_read():
    most = sampling(logit_bias=dict.fromkeys(range(300), -100.0))
    assert len(read_sampling(most, vocab_size=500).logit_bias) == 300
