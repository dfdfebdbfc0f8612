"""Where and with what a figure was measured: it means nothing without."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil

_PACKAGES = ("disagg", "torch", "grpcio", "protobuf", "uvloop", "numpy")


def describe_machine() -> dict[str, object]:
    """Of this process; the servers' may be another where a target is remote."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "load_average": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Of the source tree, with a + if it has changes; empty outside of one."""
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
        return answer.stdout.strip() if answer.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + "+" * bool(commit and git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.TimeoutExpired):
        return ""
