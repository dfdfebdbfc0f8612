"""From a model's name to an executor over a pool: what a node does between start and SERVING.

    find_model(name) -> ServedModel: layout and limits, read from config.json
    model.load(memory) -> Executor: the weights, or the emulation

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
from kvtransfer.memory import HostMemory

# Called with elements done and elements in all.
Progress = Callable[[int, int], None]

DEFAULT_MEMORY_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that this process can load. max_model_len is the longest it knows, in tokens."""

    name: str
    folder: Path
    layout: KvLayout
    max_model_len: int
    load: Callable[[HostMemory, Progress], Executor]


def find_model(name: str, *, dtype: str, block_size: int) -> ServedModel:
    """Reads what a node must know before it loads weights. Raises ValueError."""
    resolved = resolve_model(name, allow_download=False)
    folder = resolved.folder
    config = json.loads((folder / "config.json").read_text())
    if config.get("architectures") == [ARCHITECTURE]:
        return ServedModel(
            name=resolved.name,
            folder=folder,
            layout=emulated_layout(model=resolved.name, block_size=block_size),
            max_model_len=int(config["max_position_embeddings"]),
            load=lambda memory, _: EmulatedExecutor(folder=folder, memory=memory),
        )
    return _torch_model(resolved.name, folder, dtype=dtype, block_size=block_size)


def pool_blocks(
    model: ServedModel, *, kv_memory_gb: float | None, max_model_len: int, max_running: int
) -> int:
    """Blocks of a pool of kv_memory_gb (default: a share of what the machine has available), at
    most what max_running requests of max_model_len tokens can use. Raises ValueError."""
    if kv_memory_gb is None:
        kv_memory_gb = psutil.virtual_memory().available * DEFAULT_MEMORY_SHARE / 1e9
    usable = max_running * model.layout.blocks_for(max_model_len + 1)
    num_blocks = min(int(kv_memory_gb * 1e9) // model.layout.block_bytes, usable)
    if num_blocks < 2:
        raise ValueError(
            f"--kv-memory-gb: {kv_memory_gb:.3g} GB hold {num_blocks} blocks of "
            f"{model.layout.block_bytes} bytes, at least 2 are needed"
        )
    return num_blocks


def _torch_model(name: str, folder: Path, *, dtype: str, block_size: int) -> ServedModel:
    # Here, not above: an emulated node starts in a tenth of the time and memory without torch.
    from engine.checkpoint import model_digest
    from engine.host_executor import host_executor
    from engine.model_config import kv_layout, read_model_config

    config = read_model_config(folder)

    def load(memory: HostMemory, progress: Progress) -> Executor:
        return host_executor(folder, dtype=dtype, memory=memory, progress=progress)

    return ServedModel(
        name=name,
        folder=folder,
        layout=kv_layout(
            config,
            model_name=name,
            digest=model_digest(folder),
            dtype=dtype,
            block_size=block_size,
        ),
        max_model_len=config.max_position_embeddings,
        load=load,
    )
