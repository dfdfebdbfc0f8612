"""Traces of block hashes, in the format of Mooncake's: one JSON object per line.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, ...]}

A hash id names a 512-token block and all that is before it. The last, partial block of a prompt is
left out: nodes cache full blocks only.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """chain has the hashes of its prompt's full blocks."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    chain: tuple[bytes, ...]


def read_trace(path: Path) -> list[TracedRequest]:
    """All requests in order; those of one timestamp are spread evenly until the next one."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    grouped = itertools.groupby(rows, key=lambda row: row["timestamp"])
    groups = [(float(stamp), list(group)) for stamp, group in grouped]
    ends = [stamp for stamp, _ in groups[1:]] + [groups[-1][0]]
    return [
        TracedRequest(
            arrival_s=(stamp + (end - stamp) * index / len(group)) / 1e3,
            num_prompt_tokens=row["input_length"],
            num_output_tokens=row["output_length"],
            chain=tuple(
                block.to_bytes(8, "big")
                for block in row["hash_ids"][: row["input_length"] // BLOCK_SIZE]
            ),
        )
        for (stamp, group), end in zip(groups, ends, strict=True)
        for index, row in enumerate(group)
    ]
