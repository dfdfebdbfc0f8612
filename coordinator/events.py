"""What a client gets: dataclasses for the messages of the public API, and its one exception.

    GenerateResponse --read_event--> Delta | Finished        NodeInfo --read_node--> Node
    build_request(prompt, options) --> GenerateRequest

Proto types stop here; coordinator/client.py, the CLI and the benchmarks see values only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import grpc.aio

from protos.errors import read_error
from protos.pd.v1 import cluster_pb2, generation_pb2, types_pb2

# Plain text, token ids, or chat messages {"role": ..., "content": ...}.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class GenerationOptions(TypedDict, total=False):
    """Fields of GenerateRequest and of its sampling and stop parts. None is unset."""

    request_id: str | None
    model: str | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int | None
    tenant: str | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop_strings: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Of one position: its token's log-probability, and the most likely (id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Tokens of one choice, from absolute position on, and the text that they complete.

    logprobs has one entry per token if they were asked for, else it is empty.
    """

    choice: int
    position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Of consecutive prompt tokens, the first of them at position."""

    position: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinish:
    """Why a choice ended: reason is "length", "stop" or "eos"; what matched, for "stop"."""

    choice: int
    reason: str
    stop_string: str | None
    stop_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time went, in the coordinator's view. None: the request did not pass the stage."""

    queue_s: float | None
    reserve_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    handoff_gap_s: float | None
    decode_s: float | None
    ttft_s: float | None
    total_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event. served_as is "disaggregated", "local" or "resumed"; seed reproduces it."""

    request_id: str
    choices: tuple[ChoiceFinish, ...]
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    seed: int
    served_as: str
    served_as_reason: str
    prefill_node: str
    decode_node: str
    timing: Timing
    # Nodes that were lost or drained under it, and preemptions.
    num_restarts: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first one, per choice; None with fewer than two."""
        num_gaps = self.generated_tokens / max(len(self.choices), 1) - 1
        ttft_s, total_s = self.timing.ttft_s, self.timing.total_s
        if ttft_s is None or total_s is None or num_gaps <= 0:
            return None
        return (total_s - ttft_s) / num_gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as the coordinator sees it. role and state are lower case: "decode", "serving"."""

    node_id: str
    role: str
    state: str
    address: str
    model: str
    num_blocks: int
    available_blocks: int
    num_running: int
    num_queued: int
    loaded_percent: int
    queued_tokens: int = 0
    num_decoding: int = 0
    num_steps: int = 0
    # Of the step in progress; None while there is none.
    step_predicted_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """A moment of a request: at_s since it arrived."""

    at_s: float
    what: str
    details: dict[str, str]


class GenerationError(Exception):
    """A call that failed. reason is from the table in protos/errors.py, "" if none was sent."""

    def __init__(
        self,
        status: grpc.StatusCode,
        reason: str,
        message: str,
        metadata: Mapping[str, str],
        *,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{reason or status.name}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata)
        self.retry_after_s = retry_after_s

    @property
    def is_unreachable(self) -> bool:
        """No coordinator answered, or the connection broke: its own errors carry a reason."""
        return self.status is grpc.StatusCode.UNAVAILABLE and not self.reason


def build_request(prompt: Prompt, options: GenerationOptions) -> Any:
    """The GenerateRequest. Raises ValueError or TypeError for what cannot be sent."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(prompt, str):
        given["text"] = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        given["chat"] = {"messages": prompt}
    else:
        given["token_ids"] = {"ids": prompt}
    # Options carry the names of the fields; which message has a field says where it belongs.
    parts: dict[str, dict[str, Any]] = {"sampling": {}, "stop": {}, "": {}}
    for name, value in given.items():
        if name in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
            parts["sampling"][name] = value
        elif name in types_pb2.StopConditions.DESCRIPTOR.fields_by_name:
            parts["stop"][name] = value
        else:
            parts[""][name] = value
    return generation_pb2.GenerateRequest(
        sampling=types_pb2.SamplingParams(**parts["sampling"]),
        stop=types_pb2.StopConditions(**parts["stop"]),
        **parts[""],
    )


def read_event(response: Any) -> Delta | PromptLogprobs | Finished:
    """The event of a GenerateResponse."""
    if response.WhichOneof("event") == "prompt_logprobs":
        logprobs = response.prompt_logprobs
        return PromptLogprobs(
            position=logprobs.position, tokens=tuple(map(_read_logprobs, logprobs.positions))
        )
    if response.WhichOneof("event") == "delta":
        delta = response.delta
        return Delta(
            choice=delta.choice,
            position=delta.position,
            token_ids=tuple(delta.token_ids),
            text=delta.text,
            logprobs=tuple(map(_read_logprobs, delta.logprobs)),
        )
    finished = response.finished
    return Finished(
        request_id=response.request_id,
        choices=tuple(_read_choice(choice) for choice in finished.choices),
        prompt_tokens=finished.usage.prompt_tokens,
        generated_tokens=finished.usage.generated_tokens,
        cached_tokens=finished.usage.cached_tokens,
        seed=finished.seed,
        served_as=_name(generation_pb2.ServedAs, "SERVED_AS_", finished.served_as),
        served_as_reason=finished.served_as_reason,
        prefill_node=finished.prefill_node,
        decode_node=finished.decode_node,
        timing=_read_timing(finished.timing),
        num_restarts=finished.num_restarts,
    )


def read_node(info: Any) -> Node:
    """The node of a NodeInfo."""
    registration, status = info.registration, info.status
    return Node(
        node_id=registration.node.node_id,
        role=_name(cluster_pb2.NodeRole, "NODE_ROLE_", registration.role),
        state=_name(cluster_pb2.NodeState, "NODE_STATE_", status.state),
        address=registration.address,
        model=registration.layout.model,
        num_blocks=registration.num_blocks,
        available_blocks=status.available_blocks,
        num_running=status.num_running,
        num_queued=status.num_queued,
        loaded_percent=status.loaded_percent,
        queued_tokens=status.queued_tokens,
        num_decoding=status.num_decoding,
        num_steps=status.step,
        step_predicted_s=status.step_predicted.ToNanoseconds() / 1e9
        if status.HasField("step_predicted")
        else None,
    )


def read_generation_error(error: grpc.aio.AioRpcError) -> GenerationError:
    """The exception for a failed call, from its ErrorInfo where there is one."""
    sent = read_error(error)
    if sent is None:
        return GenerationError(error.code(), "", error.details() or "", {})
    return GenerationError(
        error.code(),
        sent.reason.name,
        sent.message,
        sent.metadata,
        retry_after_s=sent.retry_after_s,
    )


def _read_logprobs(position: Any) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=position.chosen.token_id,
        logprob=position.chosen.logprob,
        top=tuple((other.token_id, other.logprob) for other in position.top),
    )


def _read_choice(choice: Any) -> ChoiceFinish:
    matched = choice.WhichOneof("matched")
    return ChoiceFinish(
        choice=choice.choice,
        reason=_name(types_pb2.FinishReason, "FINISH_REASON_", choice.reason),
        stop_string=choice.stop_string if matched == "stop_string" else None,
        stop_token_id=choice.stop_token_id if matched == "stop_token_id" else None,
    )


def _read_timing(timing: Any) -> Timing:
    return Timing(
        **{
            f"{field.name}_s": getattr(timing, field.name).ToNanoseconds() / 1e9
            if timing.HasField(field.name)
            else None
            for field in timing.DESCRIPTOR.fields
        }
    )


def _name(enum: Any, prefix: str, value: int) -> str:
    return str(enum.Name(value)).removeprefix(prefix).lower()
