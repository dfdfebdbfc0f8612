"""From a model's name to an executor over a pool: what a node does between start and SERVING.

    find_model(name) -> ServedModel: layout and limits, read from config.json
    model.place(num_blocks) -> Placed: the KV memory, on the device
    placed.load() -> Executor: the weights, or the emulation

An emulated model is a folder too; its nodes never import torch.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.catalog import resolve_model
from engine.emulated_executor import ARCHITECTURE, EmulatedExecutor, emulated_layout
from engine.executor import Executor
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory, KvMemory
from kvtransfer.plane import GRPC
from kvtransfer.planes import planes_on

# Called with elements done and elements in all.
Progress = Callable[[int, int], None]

HOST_MEMORY_SHARE = 0.2
GPU_MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """KV memory, and what loads the executor over it: load(progress, max_model_len)."""

    memory: KvMemory
    load: Callable[[Progress, int], Executor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that this process can load. max_model_len is the longest it knows, in tokens.

    default_kv_bytes is what its device can give to the pool unasked; planes are the data planes
    that its KV memory can use, best first.
    """

    name: str
    folder: Path
    layout: KvLayout
    max_model_len: int
    default_kv_bytes: int
    planes: tuple[str, ...]
    place: Callable[[int], Placed]


def find_model(name: str, *, dtype: str, block_size: int, device: str = "cpu") -> ServedModel:
    """Reads what a node must know before it loads weights. Raises ValueError."""
    resolved = resolve_model(name, allow_download=False)
    folder = resolved.folder
    config = json.loads((folder / "config.json").read_text())
    if config.get("architectures") == [ARCHITECTURE]:
        return _emulated_model(
            resolved.name,
            folder,
            block_size=block_size,
            max_model_len=int(config["max_position_embeddings"]),
        )
    return _torch_model(resolved.name, folder, dtype=dtype, block_size=block_size, device=device)


def pool_blocks(
    model: ServedModel, *, kv_memory_gb: float | None, max_model_len: int, max_running: int
) -> int:
    """Blocks of a pool of kv_memory_gb (default: the model's), at most what max_running requests
    of max_model_len tokens can use. Raises ValueError."""
    size_bytes = model.default_kv_bytes if kv_memory_gb is None else int(kv_memory_gb * 1e9)
    usable = max_running * model.layout.blocks_for(max_model_len + 1)
    num_blocks = min(size_bytes // model.layout.block_bytes, usable)
    if num_blocks < 2:
        raise ValueError(
            f"--kv-memory-gb: {size_bytes / 1e9:.3g} GB hold {num_blocks} blocks of "
            f"{model.layout.block_bytes} bytes, at least 2 are needed"
        )
    return num_blocks


def _host_share() -> int:
    return int(psutil.virtual_memory().available * HOST_MEMORY_SHARE)


def _emulated_model(name: str, folder: Path, *, block_size: int, max_model_len: int) -> ServedModel:
    layout = emulated_layout(model=name, block_size=block_size)

    def place(num_blocks: int) -> Placed:
        memory = HostMemory(layout, num_blocks)
        return Placed(memory=memory, load=lambda *_: EmulatedExecutor(folder=folder, memory=memory))

    return ServedModel(
        name=name,
        folder=folder,
        layout=layout,
        max_model_len=max_model_len,
        default_kv_bytes=_host_share(),
        planes=(GRPC,),
        place=place,
    )


def _torch_model(
    name: str, folder: Path, *, dtype: str, block_size: int, device: str
) -> ServedModel:
    # Here, not above: an emulated node starts in a tenth of the time and memory without torch.
    from engine.checkpoint import model_digest
    from engine.host_executor import host_executor
    from engine.model_config import kv_layout, read_model_config

    config = read_model_config(folder)
    layout = kv_layout(
        config, model_name=name, digest=model_digest(folder), dtype=dtype, block_size=block_size
    )

    def place_on_host(num_blocks: int) -> Placed:
        memory = HostMemory(layout, num_blocks)
        return Placed(
            memory=memory,
            load=lambda progress, _: host_executor(
                folder, dtype=dtype, memory=memory, progress=progress
            ),
        )

    def place_on_gpu(num_blocks: int) -> Placed:
        from engine.gpu_executor import gpu_executor, gpu_memory

        memory = gpu_memory(layout, num_blocks, device=device)
        return Placed(
            memory=memory,
            load=lambda progress, max_model_len: gpu_executor(
                folder, memory=memory, max_model_len=max_model_len, progress=progress
            ),
        )

    if device == "cpu":
        default_kv_bytes = _host_share()
        planes = planes_on("cpu", has_nccl=False)
    else:
        from engine.gpu_executor import free_bytes
        from kvtransfer.nccl_group import has_nccl

        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        default_kv_bytes = int(GPU_MEMORY_SHARE * max(0, free_bytes(device) - weights))
        planes = planes_on(device, has_nccl=has_nccl())
    return ServedModel(
        name=name,
        folder=folder,
        layout=layout,
        max_model_len=config.max_position_embeddings,
        default_kv_bytes=default_kv_bytes,
        planes=planes,
        place=place_on_host if device == "cpu" else place_on_gpu,
    )
