"""bench/gpu_check.py on a machine without a GPU: everything in it but graphs and kernels."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu_report import Clock, Machine, Report

ROOT = Path(__file__).parents[2]


def gpu_check(*options: str) -> str:
    command = [sys.executable, "-m", "bench.gpu_check", "--device", "cpu", "--tiny", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_report(*, deadline: float = float("inf")) -> Report:
    machine = Machine(copy_rate=100.0, matmul_rate=1000.0)
    clock = Clock(torch.device("cpu"), repeats=1)
    return Report(machine=machine, clock=clock, deadline=deadline)


@pytest.mark.slow
def test_the_script_runs_through_at_toy_sizes() -> None:
    table = gpu_check()
    for what in ("paged_attention", "rope", "pack_blocks", "sample", "decode tiny", "prefill tiny"):
        assert f"| {what}" in table
    assert "0 wrong" in table


@pytest.mark.slow
def test_tuning_runs_through_at_toy_sizes() -> None:
    pytest.importorskip("triton")
    assert "| tune chunk" in gpu_check("--tune")


def test_what_is_past_the_deadline_is_listed_as_not_run() -> None:
    assert not make_report().is_late("step", "now")
    report = make_report(deadline=0.0)
    assert report.is_late("step", "too late")
    assert "not run: out of time" in report.table()


def test_a_share_is_of_the_limit_that_binds() -> None:
    report = make_report()
    assert report.share(4.0, num_bytes=200, flops=1000) == "50% of copy"
    assert report.share(4.0, num_bytes=50, flops=3000) == "75% of matmul"


def test_errors_and_nans_are_wrong() -> None:
    report = make_report()
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    report.error("op", "right", exact.float(), exact)
    report.error("op", "off", exact.float() + 1e-3, exact)
    report.error("op", "nan", torch.tensor([1.0, float("nan")]), exact)
    with report.check("op", "raises"):
        raise RuntimeError("no such kernel\nand more")
    assert [row.is_wrong for row in report.rows] == [False, True, True, True]
    assert "RuntimeError: no such kernel" in report.rows[-1].result
