"""The GPU script where there is no GPU: it says so, and does not look like a pass."""

import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can run it")
def test_without_a_gpu_the_script_says_that_it_was_not_run():
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run_nccl_pair"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (77, "not run: no CUDA device\n"), done.stderr
