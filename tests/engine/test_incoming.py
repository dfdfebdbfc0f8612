"""What a node believes of a request that reaches it: nothing that it did not check."""

import struct

import pytest

from engine.incoming import read_sequence
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
        ({"num_choices": 2}, Reason.NOT_SERVED_YET, "num_choices"),
        ({"num_logprobs": 0}, Reason.NOT_SERVED_YET, "num_logprobs"),
        (
            {"sampling": types_pb2.SamplingParams(repetition_penalty=1.0)},
            Reason.NOT_SERVED_YET,
            "repetition_penalty",
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
