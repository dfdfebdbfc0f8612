"""What a user was promised, and how many of the requests kept it.

Every request that was offered counts: one that was refused, failed or did not end is a miss, and a
late client makes the request late.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.records import OK, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Upper bounds in milliseconds; itl_p99_ms is on the gaps within one request."""

    ttft_ms: float
    tpot_ms: float
    itl_p99_ms: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """An answer of one token has no TPOT to miss."""
        if record.outcome != OK or record.ttft_s is None:
            return False
        if 1e3 * record.ttft_s > self.ttft_ms or 1e3 * (record.tpot_s or 0.0) > self.tpot_ms:
            return False
        gaps_s = record.gaps_s() if self.itl_p99_ms is not None else []
        return not gaps_s or 1e3 * float(np.percentile(gaps_s, 99)) <= (self.itl_p99_ms or 0.0)


def attainment(records: Sequence[RequestRecord], slo: Slo) -> float:
    """The share of all records that meet it; 0 of none."""
    return sum(slo.is_met(record) for record in records) / len(records) if records else 0.0
