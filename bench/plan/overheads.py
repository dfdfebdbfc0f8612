"""What a request costs beside its steps: messages between processes, and work between two steps.

    client --request--> coordinator --call--> node ... node --call--> coordinator --answer--> client

The defaults were measured with python -m bench.coordinator_cost, python -m bench.transfer and from
the nodes' logs, two cores (bench/README.md): 1.6 ms of TTFT are the coordinator's, 2.9 ms are the
four messages between it and the nodes, 2.0 ms is one block's way from offer to committed, four
messages and its bytes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Milliseconds each. step_ms is between two steps of a node, lane_message_ms for one message
    of a lane, status_ms for a node's status on its way to the coordinator."""

    request_ms: float = 0.8
    call_ms: float = 0.7
    answer_ms: float = 0.8
    status_ms: float = 0.5
    step_ms: float = 0.2
    lane_message_ms: float = 0.4


NO_OVERHEADS = Overheads(
    request_ms=0.0, call_ms=0.0, answer_ms=0.0, status_ms=0.0, step_ms=0.0, lane_message_ms=0.0
)
