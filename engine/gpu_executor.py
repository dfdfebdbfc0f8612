"""A model on a GPU: its KV memory first, its weights when they are loaded.

The twin of engine/host_executor.py. Raises ValueError where torch has no such GPU.
"""

from pathlib import Path

import torch

from engine.cuda_executor import CudaExecutor
from engine.executor import Executor
from engine.model import load_model
from engine.weights import Progress
from kvtransfer.device_memory import DeviceMemory
from kvtransfer.layout import KvLayout


def free_bytes(device: str) -> int:
    """What is free on the GPU now."""
    return int(torch.cuda.mem_get_info(_gpu(device))[0])


def gpu_memory(layout: KvLayout, num_blocks: int, *, device: str) -> DeviceMemory:
    return DeviceMemory(layout, num_blocks, device=_gpu(device))


def gpu_executor(
    folder: Path,
    *,
    memory: DeviceMemory,
    max_model_len: int,
    progress: Progress | None = None,
) -> Executor:
    """The model in a folder, where memory is. Compiles and captures, for seconds."""
    model = load_model(
        folder, dtype=memory.layout.dtype, device=str(memory.device), progress=progress
    )
    return CudaExecutor(model=model, memory=memory, max_model_len=max_model_len)


def _gpu(device: str) -> torch.device:
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device: {device}: torch {torch.__version__} sees no such GPU")
    return torch.device("cuda", index)
