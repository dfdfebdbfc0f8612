"""Compiles Triton kernels for a GPU that is not there.

    python -m tests.kernels.compile_triton 90 default
    the real launchers, on CPU tensors --> Triton compiles for the target, launches nothing
                                       --> a JSON line per kernel: registers, spills, shared memory

A program of its own, because kernels are either compiled or interpreted in a process. What is
compiled is what a launch at run time would compile: same arguments, same alignment, same config.
"""

import argparse
import functools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.attention_case import make_case
from kernels.triton.attention_tiles import Tile, chunk_tiles, decode_tiles
from kernels.triton.block_copy import copy_blocks, pack_blocks
from kernels.triton.paged_attention import paged_attention
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rope_and_cache_write import rope_and_cache_write
from kernels.triton.silu_and_mul import silu_and_mul

SINKS_N = torch.zeros(8, dtype=torch.bfloat16)
OPTIONS: list[dict[str, Any]] = [
    {"window": 100},
    {"soft_cap": 30.0},
    {"sinks_N": SINKS_N},
    {"window": 100, "soft_cap": 30.0, "sinks_N": SINKS_N},
]


class AbsentGpu:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Prints what each launch compiles to."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._label = ""
        driver.set_active(AbsentGpu(capability))
        run = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            self._report(function.fn.__name__, kernel)
            return kernel

        JITFunction.run = compile_only

    def compile(self, label: str, launch: Any, *args: Any, **kwargs: Any) -> None:
        self._label = label
        launch(*args, **kwargs)

    def _report(self, name: str, kernel: Any) -> None:
        ptx = kernel.asm["ptx"]
        (arch,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.ptx"
            path.write_text(ptx)
            ptxas = get_ptxas(self._capability).path
            command = [ptxas, "-v", f"--gpu-name={arch}", str(path), "-o", f"{folder}/kernel.cubin"]
            log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        ((stores, loads),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        (registers,) = re.findall(r"Used (\d+) registers", log)
        report = {
            "kernel": name,
            "label": self._label,
            "registers": int(registers),
            "spill_bytes": int(stores) + int(loads),
            "shared_bytes": kernel.metadata.shared,
            "num_warps": kernel.metadata.num_warps,
        }
        print(json.dumps(report), flush=True)


def compile_attention(
    compiler: Compiler,
    *,
    head_dim: int,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    """Decode with splits and its merge, and chunks."""
    case = make_case(
        [(1, 15), (45, 17)],
        heads=(2 * group_size, 2),
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
    )
    name = str(dtype).removeprefix("torch.")
    compiler.compile(
        f"D={head_dim} G={group_size} {name} {' '.join(options)}".strip(),
        paged_attention,
        case.q_TND,
        pool=case.pool,
        layer=case.layer,
        rows=case.packed(),
        **options,
    )


def compile_rest(compiler: Compiler, *, hidden: int, head_dim: int) -> None:
    """Everything but attention, in bfloat16."""
    bf16 = functools.partial(torch.zeros, dtype=torch.bfloat16)
    x, weight = bf16(3, hidden), bf16(hidden)
    compiler.compile(f"E={hidden}", rms_norm, x, weight, eps=1e-6)
    compiler.compile(f"E={hidden} add", add_rms_norm, x, x, weight, eps=1e-6)
    compiler.compile(f"F={4 * hidden}", silu_and_mul, bf16(3, 8 * hidden))
    qkv, angles = bf16(3, 12, head_dim), bf16(3, head_dim // 2)
    compiler.compile(f"heads of {head_dim}", rms_norm, qkv[:, :10], bf16(10, head_dim), eps=1e-6)
    pool = bf16(4, 2, 2, 2, 16, head_dim)
    index = torch.zeros(3, dtype=torch.int32)
    compiler.compile(
        f"D={head_dim}",
        rope_and_cache_write,
        qk_TAD=qkv[:, :10],
        v_THD=qkv[:, 10:],
        cos_TF=angles,
        sin_TF=angles,
        pool=pool,
        layer=1,
        block_T=index,
        slot_T=index,
    )
    compiler.compile("copy", copy_blocks, pool, source_K=index, target_K=index)
    compiler.compile("pack", pack_blocks, pool, block_K=index, staging=pool)


def tiles_of(head_dim: int, group_size: int) -> Iterator[dict[str, Tile]]:
    """The spaces that gpu_check tunes over, but for the chosen."""
    for tile in decode_tiles(group_size, head_dim, torch.bfloat16)[1:]:
        yield {"decode_tile": tile}
    for tile in chunk_tiles(group_size, head_dim, torch.bfloat16)[1:]:
        yield {"chunk_tile": tile}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int, choices=(80, 90, 100))
    parser.add_argument("cases", choices=("default", "all"))
    args = parser.parse_args()
    compiler = Compiler(args.capability)
    compile_rest(compiler, hidden=4096, head_dim=128)
    compile_attention(compiler, head_dim=64, group_size=3)
    compile_attention(compiler, head_dim=128, group_size=4)
    compile_attention(compiler, head_dim=128, group_size=4, window=100)
    if args.cases == "default":
        return
    for head_dim in (64, 80, 96, 128, 256):
        for group_size in (1, 3, 8):
            compile_attention(compiler, head_dim=head_dim, group_size=group_size)
        compile_attention(compiler, head_dim=head_dim, group_size=4, dtype=torch.float32)
        for options in OPTIONS:
            compile_attention(compiler, head_dim=head_dim, group_size=4, **options)
    for head_dim in (64, 128, 256):
        for tiles in tiles_of(head_dim, 4):
            compile_attention(compiler, head_dim=head_dim, group_size=4, **tiles)
    compile_rest(compiler, hidden=576, head_dim=64)
    compile_rest(compiler, hidden=8192, head_dim=80)
    compile_rest(compiler, hidden=16384, head_dim=256)


if __name__ == "__main__":
    main()
