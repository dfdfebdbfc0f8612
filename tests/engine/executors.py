"""Every executor that has logits, over a tiny model: what must hold for all is tested on all."""

from pathlib import Path

import torch

from engine.cuda_executor import CudaExecutor
from engine.executor import Executor
from engine.model import load_model
from engine.model_config import kv_layout, read_model_config
from engine.native_executor import NativeExecutor
from engine.torch_executor import TorchExecutor
from kvtransfer.device_memory import DeviceMemory
from kvtransfer.memory import HostMemory
from tests.kernels.cpu_ops import make_runner

NUM_BLOCKS = 512

# float32, and the steps of CUDA on tensors of the CPU; native is bfloat16.
KINDS = ("torch", "cuda", "native")
EXACT_KINDS = ("torch", "cuda")


def make_executor(folder: Path, kind: str, *, block_size: int = 5) -> Executor:
    """Over memory full of NaN, so that reading any slot that was not written shows."""
    dtype = "bfloat16" if kind == "native" else "float32"
    layout = kv_layout(
        read_model_config(folder),
        model_name="m",
        digest="d",
        dtype=dtype,
        block_size=block_size,
    )
    if kind == "cuda":
        device_memory = DeviceMemory(layout, NUM_BLOCKS, device=torch.device("cpu"))
        device_memory.pool.fill_(float("nan"))
        model = load_model(folder, dtype=dtype)
        return CudaExecutor(model=model, memory=device_memory, max_model_len=500, buckets=(1, 2, 5))
    memory = HostMemory(layout, NUM_BLOCKS)
    torch.frombuffer(memory.buffer, dtype=getattr(torch, dtype)).fill_(float("nan"))
    if kind == "native":
        return NativeExecutor(folder=folder, memory=memory, runner=make_runner(num_threads=2))
    return TorchExecutor(model=load_model(folder, dtype=dtype), memory=memory)
