"""GenerationService: the public API. One coroutine owns a request from arrival to its last message.

    check, tokenize -> queue (nothing held) -> pair -> attempt -> deltas -> finished

Whatever ends the coroutine (the client, the deadline, an error) closes the attempt, which frees
both nodes. Runs on the event loop.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from coordinator.answer import Answer, Marks
from coordinator.attempt import Attempt, Event, Refused, Stage
from coordinator.checked_request import MAX_ID_LENGTH, CheckedRequest, ServedLimits, check_request
from coordinator.node_channels import NodeChannels
from coordinator.pairing import Pair
from coordinator.queue import PairingQueue
from coordinator.tokenizer import ModelTokenizer
from protos.errors import Reason, ServingError
from protos.pd.v1 import generation_pb2, generation_pb2_grpc
from protos.serving import Context

log = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 120.0


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """limits is asked anew for every request, since nodes come and go."""

    def __init__(
        self,
        *,
        tokenizer: ModelTokenizer,
        limits: Callable[[], ServedLimits],
        queue: PairingQueue,
        channels: NodeChannels,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._queue = queue
        self._channels = channels

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        marks = Marks(arrived=_now())
        remaining_s = context.time_remaining()
        deadline = marks.arrived + (DEFAULT_DEADLINE_S if remaining_s is None else remaining_s)
        request_id = request.request_id or secrets.token_hex(8)
        outcome = "cancelled"
        try:
            limits = self._limits()
            async with _until(deadline):
                checked = await check_request(
                    request, request_id=request_id, tokenizer=self._tokenizer, limits=limits
                )
            async with aclosing(self._serve(checked, limits, marks, deadline)) as responses:
                async for response in responses:
                    if response.HasField("finished"):
                        # Now: a client may leave as soon as it has this.
                        outcome = "ok"
                    yield response
        except ServingError as error:
            outcome = f"{error.reason.name} {error.message}"
            raise
        finally:
            log.info(
                "request ended request=%r outcome=%r seconds=%.3f",
                request_id[:MAX_ID_LENGTH],
                outcome,
                _now() - marks.arrived,
            )

    async def _serve(
        self, checked: CheckedRequest, limits: ServedLimits, marks: Marks, deadline: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        answer = Answer(
            detokenizer=self._tokenizer.detokenizer(),
            marks=marks,
            next_position=len(checked.token_ids),
        )
        arrival = self._queue.arrival()
        while True:
            async with _until(deadline):
                claim = await self._queue.pair(arrival, checked.need)
            marks.paired = _now()
            sequence = checked.to_sequence(model=limits.model, age_s=marks.paired - marks.arrived)
            attempt = Attempt(claim, sequence, channels=self._channels, deadline=deadline)
            try:
                async with aclosing(attempt.events()) as events:
                    async for event in events:
                        delta = _take_in(event, answer)
                        if delta is not None:
                            yield generation_pb2.GenerateResponse(
                                request_id=checked.request_id, delta=delta
                            )
            except Refused:
                continue
            yield _finished(checked, answer, claim.pair)
            return


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """Bounds a wait inside one call. Raises ServingError (DEADLINE_EXCEEDED)."""
    try:
        async with asyncio.timeout(max(0.0, deadline - _now())):
            yield
    except TimeoutError:
        raise ServingError(Reason.DEADLINE_EXCEEDED, "the deadline has passed") from None


def _take_in(event: Event, answer: Answer) -> generation_pb2.GenerationDelta | None:
    now = _now()
    if event is Stage.RESERVED:
        answer.marks.reserved = now
    elif event is Stage.SEALED:
        answer.marks.sealed = now
    elif not isinstance(event, Stage):
        return answer.push(event, now=now)
    return None


def _finished(
    checked: CheckedRequest, answer: Answer, pair: Pair
) -> generation_pb2.GenerateResponse:
    is_local = pair.prefill is None
    finished = generation_pb2.GenerationFinished(
        choices=[answer.to_finish()],
        usage=generation_pb2.Usage(
            prompt_tokens=len(checked.token_ids), generated_tokens=answer.num_tokens
        ),
        seed=checked.seed,
        served_as=(
            generation_pb2.SERVED_AS_LOCAL if is_local else generation_pb2.SERVED_AS_DISAGGREGATED
        ),
        served_as_reason=pair.reason,
        prefill_node=pair.prefill.key.node_id if pair.prefill is not None else "",
        decode_node=pair.decode.key.node_id if pair.decode is not None else "",
        timing=answer.marks.to_timing(),
    )
    return generation_pb2.GenerateResponse(request_id=checked.request_id, finished=finished)


def _now() -> float:
    # Not the loop's time: uvloop's is in whole milliseconds.
    return time.monotonic()
