"""python -m bench.gpu_check: what the CUDA half does on the GPU at hand, in under five minutes.

    python -m bench.gpu_check                       # correctness, kernel times, step loop
    python -m bench.gpu_check --tune                # every tile of the attention kernel, instead
    python -m bench.gpu_check --device cpu --tiny   # the script itself, without a GPU

Needs torch with CUDA and Triton, and nothing else: weights are random, of real shapes. Exits with
status 1 if anything is wrong.
"""

import argparse
import os
import platform
import sys
import time

from bench import gpu_kernel_times, gpu_kernels, gpu_steps
from bench.gpu_report import Clock, Report, measure


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check",
        description="Checks and times the CUDA kernels and the step loop; prints one table.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script itself")
    parser.add_argument("--tune", action="store_true", help="time the attention kernel's tiles")
    parser.add_argument("--seconds", type=float, default=280.0, help="leave out what is later")
    args = parser.parse_args()
    start = time.monotonic()
    if args.device == "cpu":
        # Before Triton is imported, which a GPU's checks do later.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    device = torch.device(args.device)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check: torch sees no GPU (--device cpu --tiny tries the script without one)")
    clock = Clock(device, repeats=2 if args.tiny else 20)
    with torch.inference_mode():
        machine = measure(
            device,
            clock,
            copy_bytes=1 << 16 if args.tiny else 1 << 30,
            matmul_size=64 if args.tiny else 8192,
        )
        report = Report(machine=machine, clock=clock, deadline=start + args.seconds)
        kernel_sizes = gpu_kernel_times.TINY if args.tiny else gpu_kernel_times.FULL
        if args.tune:
            gpu_kernel_times.tune(report, kernel_sizes, device)
        else:
            gpu_kernels.check_kernels(report, device)
            gpu_kernel_times.time_kernels(report, kernel_sizes, device)
            gpu_steps.check_steps(report, gpu_steps.TINY if args.tiny else gpu_steps.FULL, device)
    name = torch.cuda.get_device_name(device) if args.device == "cuda" else platform.processor()
    print(f"{name or 'CPU'}; torch {torch.__version__}; {_triton_version()}")
    print(
        f"copy {machine.copy_rate / 1e9:.0f} GB/s (read + write), "
        f"bf16 matmul {machine.matmul_rate / 1e12:.3g} TFLOP/s"
    )
    print(report.table())
    num_wrong = sum(row.is_wrong for row in report.rows)
    print(f"{len(report.rows)} rows, {num_wrong} wrong, {time.monotonic() - start:.0f} s")
    sys.exit(1 if num_wrong else 0)


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "no triton"
    return f"triton {triton.__version__}"


if __name__ == "__main__":
    main()
