"""One planned request: what it still needs, and what its client has seen of it."""

from dataclasses import dataclass, field

from bench.records import RequestRecord
from bench.workload import Arrival
from coordinator.fair_line import Place
from coordinator.need import Need
from coordinator.pairing import Pair
from coordinator.queue import Claim
from coordinator.registry import NodeEntry
from engine.sequence import GenerationSpec, StopConditions

# Made-up prompts: nothing depends on which tokens they are.
_TOKEN = 0


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedRequest:
    """arrived_s, paired_s ... are at the coordinator, chunks and ended_s at the client."""

    index: int
    arrival: Arrival
    answer_s: float
    place: Place | None = None
    claim: Claim | None = None
    pair: Pair | None = None
    num_generated: int = 0
    num_restarts: int = 0
    arrived_s: float = 0.0
    paired_s: float | None = None
    first_token_s: float | None = None
    second_token_s: float | None = None
    sealed_s: float | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float | None = None
    outcome: str = "unfinished"
    error: str = ""

    @property
    def need(self) -> Need:
        return Need(
            num_prompt_tokens=self.arrival.num_input + self.num_generated,
            max_num_tokens=self.arrival.num_input + self.arrival.num_output,
        )

    def spec(self) -> GenerationSpec:
        """As nodes see it: the prompt, and what was generated before."""
        return GenerationSpec(
            request_id=str(self.index),
            token_ids=(_TOKEN,) * self.need.num_prompt_tokens,
            num_prompt_tokens=self.arrival.num_input,
            stop=StopConditions(max_tokens=self.arrival.num_output, ignore_eos=True),
        )

    def take_token(self, at_s: float) -> None:
        """One more, which gets to the coordinator at at_s."""
        self.num_generated += 1
        if self.num_generated == 1:
            self.first_token_s = at_s
        elif self.num_generated == 2:
            self.second_token_s = at_s
        self.chunks.append((at_s + self.answer_s, 1))

    def end(self, at_s: float, *, outcome: str, error: str = "") -> None:
        self.ended_s = at_s + self.answer_s
        self.outcome = outcome
        self.error = error

    def record(self) -> RequestRecord:
        arrival, pair = self.arrival, self.pair
        return RequestRecord(
            index=self.index,
            offered_s=arrival.at_s,
            sent_s=arrival.at_s,
            num_input=arrival.num_input,
            num_output=arrival.num_output,
            label=arrival.label,
            chunks=tuple(self.chunks),
            ended_s=self.ended_s,
            outcome=self.outcome,
            error=self.error,
            queue_s=_between(self.arrived_s, self.paired_s),
            transfer_s=_between(self.first_token_s, self.sealed_s),
            handoff_gap_s=_between(self.first_token_s, self.second_token_s),
            served_as=self._served_as(),
            prefill_node=_node_id(pair.prefill) if pair else "",
            decode_node=_node_id(pair.decode) if pair else "",
        )

    def _served_as(self) -> str:
        if self.outcome != "ok" or self.pair is None:
            return ""
        if self.num_restarts:
            return "resumed"
        return "local" if self.pair.prefill is None else "disaggregated"


def _between(start_s: float | None, end_s: float | None) -> float | None:
    if start_s is None or end_s is None:
        return None
    return max(0.0, end_s - start_s)


def _node_id(node: NodeEntry | None) -> str:
    return "" if node is None else node.key.node_id
