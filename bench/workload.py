"""What is asked of a server, and when: arrivals with their lengths, made before the run begins.

    bench/arrivals.py + bench/lengths.py, or bench/traces.py --Workload--> scaled, sampled, limited
        --> bench/driver.py (live), bench/plan (simulated)

A workload is a value: the same seed asks every server, and every simulation, the same.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request. Its prompt is text; or the tokens of block_ids, as far as num_input reaches,
    and then tokens of its own. Equal block ids stand for equal tokens."""

    at_s: float
    num_input: int
    num_output: int
    label: str = ""
    block_ids: tuple[int, ...] = ()
    # Per block id.
    block_tokens: int = 0
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Arrivals by time, the first of them seldom at 0."""

    name: str
    arrivals: tuple[Arrival, ...]

    @property
    def duration_s(self) -> float:
        """When the last one arrives."""
        return self.arrivals[-1].at_s if self.arrivals else 0.0

    @property
    def rate_per_s(self) -> float:
        """Gaps per second between the first and the last one; 0 where there is no time between."""
        if not self.arrivals:
            return 0.0
        span_s = self.duration_s - self.arrivals[0].at_s
        return (len(self.arrivals) - 1) / span_s if span_s > 0 else 0.0

    def scaled(self, rate_factor: float) -> "Workload":
        """The same requests, rate_factor times as fast."""
        if rate_factor <= 0:
            raise ValueError(f"the rate factor is {rate_factor}, needs more than 0")
        return self._with(replace(a, at_s=a.at_s / rate_factor) for a in self.arrivals)

    def at_rate(self, rate_per_s: float) -> "Workload":
        """The same requests, so fast that rate_per_s is their rate. Raises ValueError."""
        if self.rate_per_s <= 0:
            raise ValueError(f"{self.name} has no rate: its requests come at one moment")
        return self.scaled(rate_per_s / self.rate_per_s)

    def lengths_scaled(self, factor: float) -> "Workload":
        """Prompts, shared blocks and answers factor times as long, at least one token each.

        Blocks keep their ids, so what was shared stays shared, in tokens that are fewer.
        """
        if factor <= 0:
            raise ValueError(f"the length factor is {factor}, needs more than 0")

        def scale(num_tokens: int) -> int:
            return max(1, round(num_tokens * factor))

        return self._with(
            replace(
                a,
                num_input=scale(a.num_input),
                num_output=scale(a.num_output),
                block_tokens=scale(a.block_tokens) if a.block_ids else 0,
            )
            for a in self.arrivals
        )

    def limited(
        self,
        *,
        max_input: int | None = None,
        max_output: int | None = None,
        max_requests: int | None = None,
    ) -> "Workload":
        """Longer prompts and answers cut to the limits; the first max_requests arrivals.

        A prompt that is text is left as it is: only the server's tokenizer knows its length.
        """

        def cut(num_tokens: int, limit: int | None) -> int:
            return num_tokens if limit is None else min(num_tokens, limit)

        return self._with(
            replace(
                a,
                num_input=a.num_input if a.text is not None else cut(a.num_input, max_input),
                num_output=cut(a.num_output, max_output),
            )
            for a in self.arrivals[:max_requests]
        )

    def until(self, duration_s: float) -> "Workload":
        """Arrivals of the first duration_s seconds."""
        return self._with(a for a in self.arrivals if a.at_s < duration_s)

    def sampled(self, share: float, rng: random.Random) -> "Workload":
        """Each request with probability share: the rate falls with it, the shape of it stays.

        Requests that share their second block (the first is a system prompt's) are kept or left
        together: conversations stay whole, and with them what is reused.
        """
        if not 0 < share <= 1:
            raise ValueError(f"the share is {share}, needs more than 0 and at most 1")
        families: dict[int, bool] = {}

        def is_kept(arrival: Arrival) -> bool:
            chosen = rng.random() < share
            if len(arrival.block_ids) < 2:
                return chosen
            return families.setdefault(arrival.block_ids[1], chosen)

        return self._with(filter(is_kept, self.arrivals))

    def _with(self, arrivals: Iterable[Arrival]) -> "Workload":
        return replace(self, arrivals=tuple(arrivals))
