"""The tests of the C++ kernels once more, under AddressSanitizer: half a minute, so on demand.

    DISAGG_ASAN=1 python -m pytest tests/kernels/test_cpu_asan.py

torch's allocations are watched too, so that a read past the end of a tensor is found.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WATCHED = ["tests/kernels/test_cpu_linear.py", "tests/kernels/test_cpu_attention.py"]
WATCHED += ["tests/kernels/test_cpu_elementwise.py", "tests/engine/test_native_executor.py"]


@pytest.mark.skipif(not os.environ.get("DISAGG_ASAN"), reason="DISAGG_ASAN is not set")
@pytest.mark.timeout(900)
def test_no_kernel_reads_or_writes_outside_its_memory() -> None:
    found = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    environment = {
        **os.environ,
        "DISAGG_CPU_FLAGS": "-fsanitize=address -g",
        "LD_PRELOAD": found.stdout.strip(),
        # Python frees nothing at exit; torch's allocator and ours come from different libraries.
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *WATCHED]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=800, check=False)
    assert done.returncode == 0
