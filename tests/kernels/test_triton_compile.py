"""Every Triton kernel, compiled for GPUs that need not be here: no spills, and it fits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]

# Shared memory that one block of threads may have. CUDA C programming guide, technical
# specifications per compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def compiled(capability: int, cases: str, cache: Path) -> list[dict[str, Any]]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # Triton 3.9 warns that 3.10 will not fuse multiply and add unless told to.
    env |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.compile_triton", str(capability), cases]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(reports: list[dict[str, Any]], capability: int) -> None:
    names = {report["kernel"] for report in reports}
    assert names == {
        "_attend",
        "_merge_splits",
        "_move",
        "_rms_norm",
        "_rope_and_cache_write",
        "_silu_and_mul",
    }
    for report in reports:
        assert report["shared_bytes"] <= SHARED_BYTES[capability], report
        # Wider heads, and tiles that are only tried, are reported.
        if "D=256" not in report["label"] and "_tile" not in report["label"]:
            assert report["spill_bytes"] == 0, report


@pytest.mark.parametrize(
    "capability",
    [pytest.param(c, marks=[] if c == 90 else pytest.mark.slow) for c in SHARED_BYTES],
)
def test_chosen_kernels_do_not_spill_and_fit(capability: int, tmp_path: Path) -> None:
    check(compiled(capability, "default", tmp_path), capability)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_all_head_dims_options_and_tiles_of_the_spaces(capability: int, tmp_path: Path) -> None:
    reports = compiled(capability, "all", tmp_path)
    for report in reports:
        print(json.dumps(report))
    check(reports, capability)
