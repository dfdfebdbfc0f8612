"""From an engine's progress to what goes out on the wire."""

from collections.abc import Sequence

from engine.executor import PromptLogprobs, TokenLogprobs
from engine.scheduler import Progress
from kvtransfer.messages import FirstToken
from kvtransfer.wire import finish_reason_to_pb
from protos.pd.v1 import types_pb2


def token_run(drawn: Sequence[Progress], *, choice: int) -> types_pb2.TokenRun:
    """Consecutive tokens of one choice; every progress has one."""
    last = drawn[-1]
    run = types_pb2.TokenRun(
        choice=choice,
        position=drawn[0].position,
        token_ids=[_token(progress) for progress in drawn],
        logprobs=[
            _position_logprobs(_token(progress), progress.logprobs)
            for progress in drawn
            if progress.logprobs is not None
        ],
        finish_reason=finish_reason_to_pb(last.reason),
    )
    if last.reason == "stop":
        run.stop_token_id = _token(last)
    return run


def first_token(drawn: Progress, *, choice: int) -> FirstToken:
    """What a prefill node hands over."""
    token_id = _token(drawn)
    logprobs = b""
    if drawn.logprobs is not None:
        logprobs = _position_logprobs(token_id, drawn.logprobs).SerializeToString()
    return FirstToken(
        choice=choice,
        position=drawn.position,
        token_id=token_id,
        finish_reason=drawn.reason,
        logprobs=logprobs,
    )


def prompt_logprobs(logprobs: PromptLogprobs, token_ids: Sequence[int]) -> types_pb2.PromptLogprobs:
    """token_ids is the whole prompt."""
    return types_pb2.PromptLogprobs(
        position=logprobs.position,
        positions=[
            _position_logprobs(token_ids[logprobs.position + index], token)
            for index, token in enumerate(logprobs.tokens)
        ],
    )


def _position_logprobs(token_id: int, logprobs: TokenLogprobs) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=token_id, logprob=logprobs.chosen),
        top=[
            types_pb2.TokenLogprob(token_id=other, logprob=logprob)
            for other, logprob in logprobs.top
        ],
    )


def _token(progress: Progress) -> int:
    assert progress.token_id is not None
    return progress.token_id
