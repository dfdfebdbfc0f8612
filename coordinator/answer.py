"""What the client has been given of a choice: tokens by position, their text, how it ended, when.

Runs of tokens come from the prefill node (first token), from the Sealed message (the same token
again), from the decode node, and from others after a node was lost; push() passes on each position
once, whatever was repeated. A stop string ends a choice here: nodes know no text. The tokens that
spell it are delivered, its text is not.
"""

from dataclasses import dataclass

from coordinator.detokenizer import Detokenizer
from coordinator.stop_strings import StopStrings
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

    def told(self, num_tokens: int, *, now: float) -> None:
        """A choice has so many tokens now."""
        if self.first_token is None:
            self.first_token = now
        if self.second_token is None and num_tokens > 1:
            self.second_token = now
        self.last_token = now


class Answer:
    """One choice. token_ids are what it has generated; finish is set when it has ended."""

    def __init__(
        self,
        *,
        choice: int,
        num_prompt_tokens: int,
        detokenizer: Detokenizer,
        stop: types_pb2.StopConditions,
        marks: Marks,
    ) -> None:
        self.choice = choice
        self.token_ids: list[int] = []
        self.finish: generation_pb2.ChoiceFinish | None = None
        self._num_prompt_tokens = num_prompt_tokens
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop.stop_strings)
        self._min_tokens = stop.min_tokens
        self._marks = marks

    @property
    def next_position(self) -> int:
        """The first position that was not delivered yet."""
        return self._num_prompt_tokens + len(self.token_ids)

    def push(self, run: types_pb2.TokenRun, *, now: float) -> generation_pb2.GenerationDelta | None:
        """The delta to deliver, if the run has something new. Raises ServingError for a gap."""
        if self.finish is not None:
            return None
        skip = self.next_position - run.position
        if skip < 0:
            raise ServingError(
                Reason.INTERNAL, f"tokens {self.next_position} to {run.position - 1} are missing"
            )
        if skip >= len(run.token_ids):
            return None
        delta = generation_pb2.GenerationDelta(choice=self.choice, position=self.next_position)
        for index in range(skip, len(run.token_ids)):
            self._take(run, index, delta)
            if self.finish is not None:
                break
        self._marks.told(len(self.token_ids), now=now)
        return delta

    def _take(
        self, run: types_pb2.TokenRun, index: int, delta: generation_pb2.GenerationDelta
    ) -> None:
        token_id = run.token_ids[index]
        self.token_ids.append(token_id)
        delta.token_ids.append(token_id)
        if run.logprobs:
            delta.logprobs.append(run.logprobs[index])
        is_last = index == len(run.token_ids) - 1 and bool(run.finish_reason)
        is_shown = not (is_last and run.finish_reason in _HIDDEN_LAST)
        text = self._detokenizer.push([token_id] if is_shown else [])
        if is_last:
            text += self._detokenizer.finish()
        if len(self.token_ids) < self._min_tokens:
            delta.text += self._stop_strings.pass_by(text)
        else:
            delta.text += self._stop_strings.push(text)
        if self._stop_strings.matched is not None:
            self.finish = generation_pb2.ChoiceFinish(
                choice=self.choice,
                reason=types_pb2.FINISH_REASON_STOP,
                stop_string=self._stop_strings.matched,
            )
        elif is_last:
            delta.text += self._stop_strings.finish()
            self.finish = generation_pb2.ChoiceFinish(choice=self.choice, reason=run.finish_reason)
            if run.finish_reason == types_pb2.FINISH_REASON_STOP:
                self.finish.stop_token_id = token_id
