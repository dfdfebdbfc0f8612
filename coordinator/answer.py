"""What the client has been given: tokens by absolute position, their text, how it ended, when.

Runs of tokens come from the prefill node (first token), from the Sealed message (the same token
again) and from the decode node; push() passes on each position once, whatever was repeated.
"""

from dataclasses import dataclass, field

from coordinator.detokenizer import Detokenizer
from protos.errors import Reason, ServingError
from protos.pd.v1 import generation_pb2, types_pb2

_HIDDEN_LAST = (types_pb2.FINISH_REASON_EOS, types_pb2.FINISH_REASON_STOP)


@dataclass(slots=True)
class Marks:
    """Moments of a request, in loop time; what did not happen is None."""

    arrived: float
    paired: float | None = None
    reserved: float | None = None
    first_token: float | None = None
    sealed: float | None = None
    second_token: float | None = None
    last_token: float | None = None

    def to_timing(self) -> generation_pb2.Timing:
        timing = generation_pb2.Timing()
        stages = {
            "queue": (self.arrived, self.paired),
            "reserve": (self.paired, self.reserved),
            "prefill": (self.reserved or self.paired, self.first_token),
            "transfer": (self.first_token, self.sealed),
            "handoff_gap": (self.first_token, self.second_token),
            "decode": (self.second_token, self.last_token),
            "ttft": (self.arrived, self.first_token),
            "total": (self.arrived, self.last_token),
        }
        for name, (start, end) in stages.items():
            if start is not None and end is not None:
                getattr(timing, name).FromNanoseconds(max(0, int((end - start) * 1e9)))
        return timing


@dataclass(slots=True)
class Answer:
    """One choice. next_position is the first position that was not delivered yet."""

    detokenizer: Detokenizer
    marks: Marks
    next_position: int
    num_tokens: int = 0
    finish: types_pb2.TokenRun | None = field(default=None)

    def push(self, run: types_pb2.TokenRun, *, now: float) -> generation_pb2.GenerationDelta | None:
        """The delta to deliver, if the run has something new. Raises ServingError for a gap."""
        skip = self.next_position - run.position
        if skip < 0:
            raise ServingError(
                Reason.INTERNAL, f"tokens {self.next_position} to {run.position - 1} are missing"
            )
        token_ids = list(run.token_ids)[skip:]
        if not token_ids or self.finish is not None:
            return None
        position, self.next_position = self.next_position, self.next_position + len(token_ids)
        self._mark(len(token_ids), now)
        shown = token_ids
        if run.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
            self.finish = run
            if run.finish_reason in _HIDDEN_LAST:
                shown = token_ids[:-1]
        text = self.detokenizer.push(shown)
        if self.finish is not None:
            text += self.detokenizer.finish()
        return generation_pb2.GenerationDelta(
            choice=run.choice, position=position, token_ids=token_ids, text=text
        )

    def to_finish(self) -> generation_pb2.ChoiceFinish:
        assert self.finish is not None
        finish = generation_pb2.ChoiceFinish(
            choice=self.finish.choice, reason=self.finish.finish_reason
        )
        if self.finish.finish_reason == types_pb2.FINISH_REASON_STOP:
            finish.stop_token_id = self.finish.token_ids[-1]
        return finish

    def _mark(self, num_new: int, now: float) -> None:
        before, self.num_tokens = self.num_tokens, self.num_tokens + num_new
        if before < 1:
            self.marks.first_token = now
        if before < 2 <= self.num_tokens:
            self.marks.second_token = now
        self.marks.last_token = now
