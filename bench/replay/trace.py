"""Block hashes of a trace (bench/traces.py, Mooncake's format), as caches see them.

A hash id names a 512-token block and all that is before it. The last, partial block of a prompt is
left out: nodes cache full blocks only.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from bench.traces import MOONCAKE_BLOCK_TOKENS, read_trace

BLOCK_SIZE = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """chain has the hashes of its prompt's full blocks."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    chain: tuple[bytes, ...]


def read_hashes(path: Path) -> list[TracedRequest]:
    """All requests in order; those of one timestamp are spread evenly until the next one."""
    grouped = itertools.groupby(read_trace(path).arrivals, key=lambda arrival: arrival.at_s)
    groups = [(at_s, list(group)) for at_s, group in grouped]
    ends_s = [at_s for at_s, _ in groups[1:]] + [groups[-1][0]]
    return [
        TracedRequest(
            arrival_s=at_s + (end_s - at_s) * index / len(group),
            num_prompt_tokens=arrival.num_input,
            num_output_tokens=arrival.num_output,
            chain=tuple(
                block.to_bytes(8, "big")
                for block in arrival.block_ids[: arrival.num_input // BLOCK_SIZE]
            ),
        )
        for (at_s, group), end_s in zip(groups, ends_s, strict=True)
        for index, arrival in enumerate(group)
    ]
