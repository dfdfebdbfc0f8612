"""Recorded requests as workloads, told apart by what is in the file.

    Azure 2023 (CSV)     TIMESTAMP,ContextTokens,GeneratedTokens
    Mooncake (JSONL)     {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}
    prompts (JSONL)      {"prompt": "...", "max_tokens": n}

Times count from the first request. A Mooncake hash id names 512 tokens of prompt and all before
them: requests that share leading ids share a prefix. Prompts have no times; all of them are at 0
until arrivals.retimed gives them some, and their length is known to the server only: it is 0 here.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.workload import Arrival, Workload

MOONCAKE_BLOCK_TOKENS = 512
_DEFAULT_MAX_TOKENS = 128


def read_trace(path: Path) -> Workload:
    """Any of the formats. Raises ValueError that names the line; OSError."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        is_json = first.lstrip().startswith("{")
        arrivals = sorted(
            _read_json_lines(file, path) if is_json else _read_azure(file, path),
            key=lambda arrival: arrival.at_s,
        )
    if not arrivals:
        raise ValueError(f"{path} has no requests")
    start_s = arrivals[0].at_s
    shifted = (_shift(arrival, start_s) for arrival in arrivals)
    return Workload(name=path.stem, arrivals=tuple(shifted))


def has_times(workload: Workload) -> bool:
    """Whether the requests came at times of their own; prompts do not."""
    return workload.duration_s > 0


def _read_azure(lines: Iterable[str], path: Path) -> Iterator[Arrival]:
    reader = csv.DictReader(lines)
    for number, row in enumerate(reader, start=2):
        try:
            yield Arrival(
                at_s=datetime.fromisoformat(row["TIMESTAMP"]).timestamp(),
                num_input=max(1, int(row["ContextTokens"])),
                num_output=max(1, int(row["GeneratedTokens"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is no row of an Azure trace: {error}") from error


def _read_json_lines(lines: Iterable[str], path: Path) -> Iterator[Arrival]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            yield _prompt(fields) if "prompt" in fields else _mooncake(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is no request: {error}") from error


def _mooncake(fields: dict[str, Any]) -> Arrival:
    return Arrival(
        at_s=fields["timestamp"] / 1e3,
        num_input=max(1, fields["input_length"]),
        num_output=max(1, fields["output_length"]),
        block_ids=tuple(fields["hash_ids"]),
        block_tokens=MOONCAKE_BLOCK_TOKENS,
    )


def _prompt(fields: dict[str, Any]) -> Arrival:
    if not isinstance(fields["prompt"], str) or not fields["prompt"]:
        raise ValueError("the prompt is no text")
    return Arrival(
        at_s=0.0,
        num_input=0,
        num_output=int(fields.get("max_tokens", _DEFAULT_MAX_TOKENS)),
        text=fields["prompt"],
    )


def _shift(arrival: Arrival, start_s: float) -> Arrival:
    return replace(arrival, at_s=arrival.at_s - start_s)
