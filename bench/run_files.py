"""The files of a run: requests.jsonl has every request's timeline, summary.json all the rest.

A summary says how it was measured (machine, versions, command, pinning, seed, workload) beside
what: figures without that cannot be repeated. bench/report reads both.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from bench.records import write_jsonl
from bench.run import Goodput, Outcome
from bench.slo import Slo, attainment
from bench.workload import Workload

SUMMARY_FILE = "summary.json"
REQUESTS_FILE = "requests.jsonl"


def summarise(
    outcome: Outcome,
    *,
    name: str,
    seed: int,
    slo: Slo | None,
    goodput: Goodput | None,
    facts: Mapping[str, object],
) -> dict[str, Any]:
    """facts: what else is known of the target and the load. With goodput, outcome is its best."""
    machine = describe_machine()
    summary: dict[str, Any] = {
        "name": name,
        "command": machine.pop("command"),
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": machine.pop("versions"),
        "machine": machine,
        "seed": seed,
        "workload": describe_workload(outcome.workload),
        **facts,
        "validity": outcome.validity.to_dict(),
        "measures": outcome.measures.to_dict(),
        "nodes": outcome.nodes,
    }
    if slo is not None:
        summary |= {"slo": asdict(slo), "attainment": attainment(outcome.driven.records, slo)}
    if goodput is not None:
        summary["goodput"] = {"rate_per_s": goodput.rate_per_s, "tried": goodput.tried}
        # One bad run may have turned the search.
        summary["validity"] |= {"reasons": goodput.problems, "is_valid": not goodput.problems}
    return summary


def write_run(folder: Path, summary: Mapping[str, Any], outcome: Outcome) -> None:
    """Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / REQUESTS_FILE, outcome.driven.records)
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=1) + "\n")


def describe_workload(workload: Workload) -> dict[str, object]:
    arrivals = workload.arrivals
    return {
        "name": workload.name,
        "num_requests": len(arrivals),
        "rate_per_s": workload.rate_per_s,
        "duration_s": workload.duration_s,
        "mean_input_tokens": sum(a.num_input for a in arrivals) / len(arrivals),
        "mean_output_tokens": sum(a.num_output for a in arrivals) / len(arrivals),
    }
