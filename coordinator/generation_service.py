"""GenerationService: the public API. One coroutine owns a request from arrival to its last message.

    check, tokenize -> Request: queue (nothing held) -> pair -> attempt -> deltas -> finished

Whatever ends the coroutine (the client, the deadline, an error) closes the attempt, which frees
both nodes. Runs on the event loop.
"""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from coordinator.answer import Marks
from coordinator.checked_request import (
    MAX_ID_LENGTH,
    ServedLimits,
    check_prompt,
    check_request,
    request_limits,
)
from coordinator.metrics import GenerationMetrics
from coordinator.node_channels import NodeChannels
from coordinator.queue import PairingQueue
from coordinator.request import Request, until
from coordinator.timeline import Timeline, Timelines
from coordinator.tokenizer import ModelTokenizer
from protos.errors import Reason, ServingError, invalid
from protos.pd.v1 import generation_pb2, generation_pb2_grpc
from protos.serving import Context

log = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 120.0


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """limits is asked anew for every request, since nodes come and go. shares_cache: tenants may
    find each other's cached prefixes."""

    def __init__(
        self,
        *,
        tokenizer: ModelTokenizer,
        limits: Callable[[], ServedLimits],
        queue: PairingQueue,
        channels: NodeChannels,
        metrics: GenerationMetrics,
        shares_cache: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._queue = queue
        self._channels = channels
        self._metrics = metrics
        self._shares_cache = shares_cache
        self._timelines = Timelines()

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        marks = Marks(arrived=time.monotonic())
        remaining_s = context.time_remaining()
        deadline = marks.arrived + (DEFAULT_DEADLINE_S if remaining_s is None else remaining_s)
        request_id = request.request_id or secrets.token_hex(8)
        outcome = "cancelled"
        with (
            self._metrics.request(marks) as meter,
            self._timelines.running(request_id[: MAX_ID_LENGTH + 1]) as timeline,
        ):
            try:
                generation = await self._check(request, request_id, marks, timeline, deadline)
                meter.accepted(
                    num_prompt_tokens=len(generation.checked.token_ids), timeline=timeline
                )
                async with aclosing(generation.responses()) as responses:
                    async for response in responses:
                        meter.told(response)
                        if response.HasField("finished"):
                            # Now: a client may leave as soon as it has this.
                            outcome = "ok"
                        yield response
            except ServingError as error:
                outcome = f"{error.reason.name} {error.message}"
                raise
            finally:
                timeline.add("ended", outcome=outcome)
                log.info(
                    "request ended request=%r outcome=%r seconds=%.3f",
                    request_id[:MAX_ID_LENGTH],
                    outcome,
                    time.monotonic() - marks.arrived,
                    extra={"request": request_id[:MAX_ID_LENGTH]},
                )

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        limits = self._limits()
        self._check_model(request.model, limits)
        generate = generation_pb2.GenerateRequest()
        match request.WhichOneof("prompt"):
            case "text":
                generate.text = request.text
            case "chat":
                generate.chat.CopyFrom(request.chat)
        token_ids = await check_prompt(generate, self._tokenizer, limits)
        return generation_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        limits = self._limits()
        self._check_model(request.model, limits)
        if any(token_id >= limits.vocab_size for token_id in request.token_ids):
            raise invalid("token_ids", f"ids are not in 0..{limits.vocab_size - 1}")
        detokenizer = self._tokenizer.detokenizer()
        text = detokenizer.push(request.token_ids) + detokenizer.finish()
        return generation_pb2.DetokenizeResponse(text=text)

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: Context
    ) -> generation_pb2.GetModelResponse:
        limits = self._limits()
        return generation_pb2.GetModelResponse(
            model=limits.model,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            has_chat_template=self._tokenizer.has_chat_template,
            limits=request_limits(),
        )

    async def Explain(
        self, request: generation_pb2.ExplainRequest, context: Context
    ) -> generation_pb2.ExplainResponse:
        timeline = self._timelines.find(request.request_id)
        response = generation_pb2.ExplainResponse(
            request_id=timeline.request_id, is_running=timeline.is_running
        )
        for event in timeline.events:
            told = response.events.add(what=event.what, details=event.details)
            told.at.FromNanoseconds(int(event.at_s * 1e9))
        return response

    async def _check(
        self,
        request: generation_pb2.GenerateRequest,
        request_id: str,
        marks: Marks,
        timeline: Timeline,
        deadline: float,
    ) -> Request:
        limits = self._limits()
        async with until(deadline):
            checked = await check_request(
                request,
                request_id=request_id,
                tokenizer=self._tokenizer,
                limits=limits,
                shares_cache=self._shares_cache,
            )
        timeline.add("arrived", prompt_tokens=len(checked.token_ids), choices=checked.num_choices)
        return Request(
            checked,
            model=limits.model,
            tokenizer=self._tokenizer,
            queue=self._queue,
            channels=self._channels,
            marks=marks,
            timeline=timeline,
            deadline=deadline,
        )

    def _check_model(self, model: str, limits: ServedLimits) -> None:
        if model and model != limits.model:
            raise ServingError(
                Reason.UNKNOWN_MODEL,
                f"model: {model[:MAX_ID_LENGTH]!r} is not served, {limits.model!r} is",
                field="model",
            )
