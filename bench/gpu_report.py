"""What gpu_check shares between its parts: the machine's measured limits, a clock, one table.

machine = measure(device, ...)          copy bandwidth, matmul rate
report.speed("rms_norm", ..., num_bytes=...)   -> a row: time, and its fraction of the limit
report.error("rms_norm", ..., ours, exact)     -> a row: relative error, and the verdict
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

# What rounding the result to a dtype, and a few values before it, may cost, of the largest value.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

# Larger than any L2: written between two timed runs, so that none finds its inputs there.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    what: str
    case: str
    result: str
    share: str
    is_wrong: bool = False


class Clock:
    """Median time of a function on a device, inputs not in its cache."""

    def __init__(self, device: torch.device, *, repeats: int) -> None:
        self._device = device
        self._repeats = repeats
        size = _FLUSH_BYTES if device.type == "cuda" else 1 << 10
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def time_s(self, function: Callable[[], object]) -> float:
        """On a GPU, between events around the launches: Python's time is hidden if it is short."""
        for _ in range(3 if self._device.type == "cuda" else 1):
            function()
        return statistics.median(self._once_s(function) for _ in range(self._repeats))

    def wall_s(self, function: Callable[[], object]) -> float:
        """From Python's side; the function waits for the device."""
        function()
        times = []
        for _ in range(self._repeats):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _once_s(self, function: Callable[[], object]) -> float:
        self._flush.zero_()
        if self._device.type != "cuda":
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        start_event, end_event = _timing_event(), _timing_event()
        start_event.record()
        function()
        end_event.record()
        end_event.synchronize()
        milliseconds: float = start_event.elapsed_time(end_event)
        return milliseconds / 1e3


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Measured here and now: bytes/s of a copy (read plus written), bf16 FLOP/s of a product."""

    copy_rate: float
    matmul_rate: float


def measure(device: torch.device, clock: Clock, *, copy_bytes: int, matmul_size: int) -> Machine:
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = clock.time_s(lambda: target.copy_(source))
    a = torch.randn(matmul_size, matmul_size, device=device).bfloat16()
    out = torch.empty_like(a)
    matmul_s = clock.time_s(lambda: torch.mm(a, a, out=out))
    return Machine(copy_rate=2 * copy_bytes / copy_s, matmul_rate=2 * matmul_size**3 / matmul_s)


@dataclass(slots=True, kw_only=True)
class Report:
    """Rows as they come; past the deadline, only that a check was left out."""

    machine: Machine
    clock: Clock
    deadline: float
    rows: list[Row] = field(default_factory=list)

    @contextmanager
    def check(self, what: str, case: str) -> Iterator[None]:
        """A failure within is a row of the table, not the end of it."""
        try:
            yield
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            self.add(what, case, f"{type(error).__name__}: {text[:60]}", is_wrong=True)

    def is_late(self, what: str, case: str) -> bool:
        late = time.monotonic() > self.deadline
        if late:
            self.add(what, case, "not run: out of time")
        return late

    def error(self, what: str, case: str, ours: torch.Tensor, exact: torch.Tensor) -> None:
        """ours against exact, which is float64."""
        worst = float((ours.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))
        bound = TOLERANCE[ours.dtype]
        # Not above would let a NaN through.
        is_wrong = not worst <= bound
        self.add(what, case, f"error {worst:.1e} of {bound:.0e}", is_wrong=is_wrong)

    def speed(
        self,
        what: str,
        case: str,
        function: Callable[[], object],
        *,
        num_bytes: float = 0.0,
        flops: float = 0.0,
    ) -> float:
        """Seconds; shown as a fraction of the limit that binds it."""
        seconds = self.clock.time_s(function)
        self.add(what, case, f"{seconds * 1e6:.1f} us", self.share(seconds, num_bytes, flops))
        return seconds

    def share(self, seconds: float, num_bytes: float = 0.0, flops: float = 0.0) -> str:
        least_copy_s = num_bytes / self.machine.copy_rate
        least_matmul_s = flops / self.machine.matmul_rate
        limit = "copy" if least_copy_s >= least_matmul_s else "matmul"
        return f"{max(least_copy_s, least_matmul_s) / seconds:.0%} of {limit}"

    def add(
        self, what: str, case: str, result: str, share: str = "", *, is_wrong: bool = False
    ) -> None:
        self.rows.append(Row(what=what, case=case, result=result, share=share, is_wrong=is_wrong))

    def table(self) -> str:
        """Markdown."""
        cells = [("what", "case", "result", "share of limit", "")]
        cells += [
            (row.what, row.case, row.result, row.share, "WRONG" if row.is_wrong else "")
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(5)]
        lines = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in cells
        ]
        lines = [f"{line} |" for line in lines]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join(lines)
