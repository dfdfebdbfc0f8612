"""One Python program in a process of its own; its last line says what went wrong.

run_child(["-m", "pip", ...]) --exit 0--> returns
                              --else----> FetchFailed(origin, last line of its output)
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.model_cache import FetchFailed

_REPORT_EVERY_S = 0.25


def run_child(
    arguments: Sequence[str],
    *,
    origin: str,
    deadline_s: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    report: Callable[[], None] = lambda: None,
) -> None:
    """Runs this Python with arguments; calls report every now and then while it runs.

    Raises FetchFailed about origin. The child is killed at the deadline and if we are interrupted.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            # One file for both: a full pipe would stop a child that nobody reads.
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(child, deadline_s=deadline_s, report=report)
        except TimeoutError:
            raise FetchFailed(origin, f"took longer than {deadline_s:g} s") from None
        finally:
            child.kill()
            child.wait()
        if child.returncode < 0:
            raise FetchFailed(origin, f"was killed by signal {-child.returncode}")
        if child.returncode > 0:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise FetchFailed(origin, lines[-1] if lines else f"exit code {child.returncode}")


def _wait(
    child: "subprocess.Popen[bytes]", *, deadline_s: float, report: Callable[[], None]
) -> None:
    ends_at_s = time.monotonic() + deadline_s
    while time.monotonic() < ends_at_s:
        try:
            child.wait(timeout=_REPORT_EVERY_S)
            return
        except subprocess.TimeoutExpired:
            report()
    raise TimeoutError
