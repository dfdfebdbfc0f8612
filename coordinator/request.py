"""One request from its place in line to its last message, through as many attempts as it takes.

    place -> pair -> attempt --> deltas --> finished
               ^        | a node lost, drained or full; preempted
               +--------+ the same sequence, longer by what was generated

An attempt that breaks is followed by another, on other nodes or the same, that goes on from the
tokens that were received. So there is one path for lost nodes, drains and preemption, and the
client sees one stream. Runs on the event loop.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from coordinator.answer import Answer, Marks
from coordinator.attempt import Attempt, CacheHit, Event, Refused, Stage
from coordinator.checked_request import CheckedRequest
from coordinator.node_channels import NodeChannels
from coordinator.pairing import Pair
from coordinator.queue import Claim, PairingQueue
from coordinator.timeline import Timeline
from coordinator.tokenizer import ModelTokenizer
from protos.errors import Reason, ServingError
from protos.pd.v1 import generation_pb2, types_pb2

# Nodes that a request may lose before it is given up; preemptions do not count.
MAX_RESTARTS = 4
# How long a request waits for nodes to come while there are none.
NODES_WAIT_S = 10.0
_NODES_RETRY_S = 0.1
# What is nobody's fault but a node's, or the moment's.
_RECOVERABLE = frozenset(
    {
        Reason.NODE_LOST,
        Reason.LANE_LOST,
        Reason.TRANSFER_ABORTED,
        Reason.NOT_READY,
        Reason.UNKNOWN_NODE,
        Reason.PREEMPTED,
    }
)


class Request:
    """A checked request on its way; pair is that of the last attempt."""

    def __init__(
        self,
        checked: CheckedRequest,
        *,
        model: str,
        tokenizer: ModelTokenizer,
        queue: PairingQueue,
        channels: NodeChannels,
        marks: Marks,
        timeline: Timeline,
        deadline: float,
    ) -> None:
        self.checked = checked
        self.marks = marks
        self.pair: Pair | None = None
        self.num_restarts = 0
        self.answers = [
            Answer(
                choice=choice,
                num_prompt_tokens=len(checked.token_ids),
                detokenizer=tokenizer.detokenizer(),
                stop=checked.stop,
                marks=marks,
            )
            for choice in range(checked.num_choices)
        ]
        self._model = model
        self._queue = queue
        self._channels = channels
        self._timeline = timeline
        self._deadline = deadline
        self._place = queue.place(
            checked.need(self.answers), priority=checked.priority, tenant=checked.tenant
        )
        self._num_lost = 0
        # None until a node has told.
        self._num_cached: int | None = None
        self._num_prompt_logprobs = 0

    async def responses(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Deltas, then finished. Raises ServingError."""
        remaining_s = self._deadline - _now()
        need = self.checked.need(self.answers)
        self._queue.check_served(need)
        self._queue.admit(self._place, need, remaining_s=remaining_s)
        self._timeline.add("queued", waiting=len(self._queue))
        while True:
            claim = await self._pair()
            try:
                async with aclosing(self._attempt(claim)) as responses:
                    async for response in responses:
                        yield response
            except Refused:
                self._timeline.add("refused", node=claim.pair.decode and claim.pair.decode.key)
                continue
            except ServingError as error:
                self._restart(error)
                continue
            yield self._finished(claim.pair)
            return

    @property
    def _unfinished(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.finish is None]

    async def _pair(self) -> Claim:
        """Waits for a pair, and for there to be nodes again: there were some when it came."""
        give_up: float | None = None
        while True:
            try:
                async with until(self._deadline):
                    claim = await self._queue.pair(self._place, self.checked.need(self._unfinished))
                break
            except ServingError as error:
                if error.reason is not Reason.NO_NODES:
                    raise
                give_up = give_up or _now() + NODES_WAIT_S
                if _now() > give_up:
                    raise
                async with until(self._deadline):
                    await asyncio.sleep(_NODES_RETRY_S)
        self.pair = claim.pair
        if self.marks.paired is None:
            self.marks.paired = _now()
        prefill, decode = claim.pair.prefill, claim.pair.decode
        self._timeline.add(
            "paired",
            prefill=prefill.key if prefill else "",
            decode=decode.key if decode else "",
            reason=claim.pair.reason,
            prefill_cached=claim.pair.prefill_cached_tokens,
            decode_cached=claim.pair.decode_cached_tokens,
        )
        return claim

    async def _attempt(self, claim: Claim) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        sequence = self.checked.to_sequence(
            self._unfinished,
            model=self._model,
            age_s=_now() - self.marks.arrived,
            attempt=self.num_restarts,
            scores_prompt=self._num_prompt_logprobs < len(self.checked.token_ids) - 1,
        )
        attempt = Attempt(claim, sequence, channels=self._channels, deadline=self._deadline)
        async with aclosing(attempt.events()) as events:
            async for event in events:
                response = self._take_in(event)
                if response is not None:
                    response.request_id = self.checked.request_id
                    yield response
                if not self._unfinished:
                    return

    def _take_in(self, event: Event) -> generation_pb2.GenerateResponse | None:
        now = _now()
        if isinstance(event, Stage):
            self._timeline.add(event.value)
            if event is Stage.RESERVED:
                self.marks.reserved = self.marks.reserved or now
            else:
                self.marks.sealed = self.marks.sealed or now
            return None
        if isinstance(event, CacheHit):
            self._hit(event)
            return None
        if isinstance(event, types_pb2.PromptLogprobs):
            return self._prompt_logprobs(event)
        if event.choice >= len(self.answers):
            raise ServingError(Reason.INTERNAL, f"tokens of choice {event.choice}")
        is_first = self.marks.first_token is None
        delta = self.answers[event.choice].push(event, now=now)
        if delta is None:
            return None
        if is_first:
            self._timeline.add("first token", position=delta.position)
        return generation_pb2.GenerateResponse(delta=delta)

    def _hit(self, hit: CacheHit) -> None:
        assert self.pair is not None
        is_prefill = hit.side == "prefill"
        pair = self.pair
        predicted = pair.prefill_cached_tokens if is_prefill else pair.decode_cached_tokens
        self._timeline.add("cached", side=hit.side, tokens=hit.num_tokens, predicted=predicted)
        if hit.saves_compute:
            # What a later attempt finds may be there because an earlier one has computed it.
            before = len(self.checked.token_ids) if self._num_cached is None else self._num_cached
            self._num_cached = min(before, hit.num_tokens)

    def _prompt_logprobs(
        self, logprobs: types_pb2.PromptLogprobs
    ) -> generation_pb2.GenerateResponse | None:
        """Each position once, also when a second node computes the prompt again."""
        skip = 1 + self._num_prompt_logprobs - logprobs.position
        new = logprobs.positions[max(0, skip) :]
        if not new:
            return None
        position = 1 + self._num_prompt_logprobs
        self._num_prompt_logprobs += len(new)
        return generation_pb2.GenerateResponse(
            prompt_logprobs=types_pb2.PromptLogprobs(position=position, positions=new)
        )

    def _restart(self, error: ServingError) -> None:
        """Counts, and raises the error again when that is enough."""
        is_preempted = error.reason is Reason.PREEMPTED
        self._num_lost += not is_preempted
        self._timeline.add("broken", reason=error.reason.name, error=error.message)
        if error.reason not in _RECOVERABLE or self._num_lost > MAX_RESTARTS:
            raise error
        self.num_restarts += 1

    def _finished(self, pair: Pair) -> generation_pb2.GenerateResponse:
        served_as = (
            generation_pb2.SERVED_AS_LOCAL
            if pair.prefill is None
            else generation_pb2.SERVED_AS_DISAGGREGATED
        )
        finished = generation_pb2.GenerationFinished(
            choices=[answer.finish for answer in self.answers if answer.finish is not None],
            usage=generation_pb2.Usage(
                prompt_tokens=len(self.checked.token_ids),
                generated_tokens=sum(len(answer.token_ids) for answer in self.answers),
                cached_tokens=self._num_cached or 0,
            ),
            seed=self.checked.seed,
            served_as=generation_pb2.SERVED_AS_RESUMED if self.num_restarts else served_as,
            served_as_reason=pair.reason,
            prefill_node=pair.prefill.key.node_id if pair.prefill is not None else "",
            decode_node=pair.decode.key.node_id if pair.decode is not None else "",
            timing=self.marks.to_timing(),
            num_restarts=self.num_restarts,
        )
        return generation_pb2.GenerateResponse(
            request_id=self.checked.request_id, finished=finished
        )


@asynccontextmanager
async def until(deadline: float) -> AsyncIterator[None]:
    """Bounds a wait inside one call. Raises ServingError (DEADLINE_EXCEEDED)."""
    try:
        async with asyncio.timeout(max(0.0, deadline - _now())):
            yield
    except TimeoutError:
        raise ServingError(Reason.DEADLINE_EXCEEDED, "the deadline has passed") from None


def _now() -> float:
    # Not the loop's time: uvloop's is in whole milliseconds.
    return time.monotonic()
