"""Which executor computes a model on the CPU: the one place where that is decided.

    bfloat16, and the C++ kernels are there or can be compiled    NativeExecutor
    else                                                          TorchExecutor

float32 stays with torch: it is what exactness is judged by. DISAGG_CPU_ISA=torch keeps bfloat16
there too, to compare.
"""

import logging
import os
from pathlib import Path

import torch

from engine.executor import Executor
from engine.model import load_model
from engine.native_executor import NativeExecutor
from engine.torch_executor import TorchExecutor
from engine.weights import Progress
from kernels.cpu.build import BuildFailed
from kernels.cpu.library import Runner, load_library
from kvtransfer.memory import HostMemory

log = logging.getLogger(__name__)


def host_executor(
    folder: Path, *, dtype: str, memory: HostMemory, progress: Progress | None = None
) -> Executor:
    """The model in a folder, on as many threads as torch has. Raises ValueError, one line."""
    runner = _runner() if dtype == "bfloat16" else None
    if runner is not None:
        return NativeExecutor(folder=folder, memory=memory, runner=runner, progress=progress)
    return TorchExecutor(model=load_model(folder, dtype=dtype, progress=progress), memory=memory)


def _runner() -> Runner | None:
    if os.environ.get("DISAGG_CPU_ISA") == "torch":
        return None
    try:
        runner = Runner(load_library(), num_threads=torch.get_num_threads())
    except (BuildFailed, OSError) as error:
        log.warning("no C++ kernels, several times slower without: %s", error)
        return None
    log.info("C++ kernels isa=%s threads=%d", runner.isa, torch.get_num_threads())
    return runner
