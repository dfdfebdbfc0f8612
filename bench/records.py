"""One request under load as its client saw it, and the file of a run's requests.

    driver, simulator --RequestRecord--> bench/measures.py, bench/slo.py, bench/report/
                                     --> write_jsonl --> requests.jsonl --> read_jsonl

All times are seconds since the run's start. A request is timed from when it should have been sent,
not from when it was: a client that is late counts against what it measures, never for it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

OK, REFUSED, FAILED, UNFINISHED = OUTCOMES = ("ok", "refused", "failed", "unfinished")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """outcome is "ok", "refused" (by a full queue or a rate limit), "failed" or "unfinished"."""

    index: int
    # When it should have been sent, and when it was.
    offered_s: float
    sent_s: float
    # Prompt tokens, and tokens asked for.
    num_input: int
    num_output: int
    label: str = ""
    # (when it came, tokens in it), in order.
    chunks: tuple[tuple[float, int], ...] = ()
    ended_s: float | None = None
    outcome: str = "ok"
    error: str = ""
    # As the server tells it; None or "" where it does not.
    queue_s: float | None = None
    transfer_s: float | None = None
    handoff_gap_s: float | None = None
    served_as: str = ""
    prefill_node: str = ""
    decode_node: str = ""
    num_cached: int = 0

    @property
    def ttft_s(self) -> float | None:
        return self.chunks[0][0] - self.offered_s if self.chunks else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.offered_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two."""
        num_gaps = self.num_generated - 1
        return (self.chunks[-1][0] - self.chunks[0][0]) / num_gaps if num_gaps > 0 else None

    @property
    def num_generated(self) -> int:
        return sum(num_tokens for _, num_tokens in self.chunks)

    def gaps_s(self) -> list[float]:
        """Between each token and the next; tokens of one chunk have no time between them."""
        gaps: list[float] = []
        before: float | None = None
        for at_s, num_tokens in self.chunks:
            if num_tokens and before is not None:
                gaps.append(at_s - before)
            gaps += [0.0] * (num_tokens - 1)
            before = at_s
        return gaps


def write_jsonl(path: Path, records: Iterable[RequestRecord]) -> None:
    """One JSON object a line."""
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(asdict(record)) + "\n")


def read_jsonl(path: Path) -> list[RequestRecord]:
    """What write_jsonl wrote. Raises ValueError that names the line."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            fields = json.loads(line)
            fields["chunks"] = tuple((at_s, num_tokens) for at_s, num_tokens in fields["chunks"])
            records.append(RequestRecord(**fields))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is not a request record: {error}") from error
    return records
