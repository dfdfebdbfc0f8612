"""Whether a run may be believed: what the load generator did to itself.

    async with Watch() as watch:  ... run ...      watch.check(records) -> Validity

A client that sends late, whose loop lags or that has no processor time left measures itself, and
one that is out of file descriptors refuses its own requests. Such a run is marked invalid. Its CPU
share is looked at second by second, because a mean over a run and its drain would hide it.
"""

import asyncio
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench.records import RequestRecord

# Bounds past which a run is invalid.
MAX_LATE_P99_MS = 10.0
MAX_LATE_MS = 100.0
MAX_LAG_P99_MS = 10.0
MAX_CPU_SHARE = 0.85
MAX_FILES_SHARE = 0.9
_LOOK_INTERVAL_S = 0.02
_CPU_WINDOW_S = 1.0
_FD_FOLDER = "/proc/self/fd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """reasons is empty for a valid run. late: from when a request was due to when it was sent; lag:
    how much later than asked for the client's event loop woke; CPU in cores, of the client."""

    reasons: tuple[str, ...]
    late_p99_ms: float
    late_max_ms: float
    lag_p99_ms: float
    cpu_share: float
    # Of the busiest second.
    cpu_share_max: float
    num_open_files: int
    open_file_limit: int

    @property
    def is_valid(self) -> bool:
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        return {"is_valid": self.is_valid, **asdict(self)}


class Watch:
    """Looks at this process for the time of the block, and lets it open as many files as it may."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._cpu_shares: list[float] = []
        self._num_files = 0

    async def __aenter__(self) -> Self:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._began_s, self._began_cpu_s = time.monotonic(), time.process_time()
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._wall_s = time.monotonic() - self._began_s
        self._cpu_s = time.process_time() - self._began_cpu_s
        self._count_files()
        self._looking.cancel()
        await asyncio.wait([self._looking])

    def check(self, records: Sequence[RequestRecord]) -> Validity:
        """After the block."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return judge(
            late_ms=[1e3 * (record.sent_s - record.offered_s) for record in records],
            lag_ms=[1e3 * lag_s for lag_s in self._lags_s],
            cpu_shares=self._cpu_shares,
            cpu_share=self._cpu_s / self._wall_s,
            num_open_files=self._num_files,
            open_file_limit=limit,
        )

    async def _look(self) -> None:
        window_s, window_cpu_s = self._began_s, self._began_cpu_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LOOK_INTERVAL_S)
            now = time.monotonic()
            self._lags_s.append(now - before - _LOOK_INTERVAL_S)
            if now - window_s >= _CPU_WINDOW_S:
                cpu_s = time.process_time()
                self._cpu_shares.append((cpu_s - window_cpu_s) / (now - window_s))
                window_s, window_cpu_s = now, cpu_s
                self._count_files()

    def _count_files(self) -> None:
        self._num_files = max(self._num_files, len(os.listdir(_FD_FOLDER)))


def judge(
    *,
    late_ms: Sequence[float],
    lag_ms: Sequence[float],
    cpu_shares: Sequence[float],
    cpu_share: float,
    num_open_files: int,
    open_file_limit: int,
) -> Validity:
    """cpu_shares are of the seconds of a run, cpu_share is of all of it."""
    late_p99_ms, late_max_ms, lag_p99_ms = _p99(late_ms), max(late_ms, default=0.0), _p99(lag_ms)
    cpu_share_max = max(cpu_shares, default=cpu_share)
    reasons = []
    if late_p99_ms > MAX_LATE_P99_MS or late_max_ms > MAX_LATE_MS:
        reasons.append(
            f"requests were sent late, by {late_p99_ms:.0f} ms at p99 and {late_max_ms:.0f} ms "
            f"at most: the bounds are {MAX_LATE_P99_MS:.0f} and {MAX_LATE_MS:.0f} ms"
        )
    if lag_p99_ms > MAX_LAG_P99_MS:
        reasons.append(
            f"the client's event loop lagged by {lag_p99_ms:.0f} ms at p99: "
            f"the bound is {MAX_LAG_P99_MS:.0f} ms"
        )
    if cpu_share_max > MAX_CPU_SHARE:
        reasons.append(
            f"the client took {cpu_share_max:.2f} of a core in its busiest second: "
            f"the bound is {MAX_CPU_SHARE}"
        )
    if num_open_files > MAX_FILES_SHARE * open_file_limit:
        reasons.append(
            f"the client had {num_open_files} files open and may have {open_file_limit} (ulimit -n)"
        )
    return Validity(
        reasons=tuple(reasons),
        late_p99_ms=late_p99_ms,
        late_max_ms=late_max_ms,
        lag_p99_ms=lag_p99_ms,
        cpu_share=cpu_share,
        cpu_share_max=cpu_share_max,
        num_open_files=num_open_files,
        open_file_limit=open_file_limit,
    )


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0
