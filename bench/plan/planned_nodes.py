"""The nodes that a plan is for: known ones, changed by what the command line says.

    --coordinator | --profile | figures typed in  --> KnownNodes --speed, memory, limits--> cluster

What is typed in goes before what is known, so "what if" is one more option.
"""

import asyncio
from dataclasses import dataclass, fields, replace
from pathlib import Path

from bench.plan.cluster_model import ClusterModel, NodeModel
from bench.plan.profiles import KnownNodes, faster, read_cluster, read_profile_file
from engine.cost_model import CostProfile

# Of a node whose memory nobody told: a fifth of a small machine's.
DEFAULT_KV_GB = 4.0
_BLOCK_SIZE = 16
_NOTHING = CostProfile(
    base_ms=0.0,
    decode_row_ms=0.0,
    prefill_token_ms=0.0,
    decode_context_ms=0.0,
    prefill_context_ms=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedFigures:
    """A cost profile's figures, as far as they were typed in."""

    base_ms: float | None = None
    decode_row_ms: float | None = None
    prefill_token_ms: float | None = None
    decode_context_ms: float | None = None
    prefill_context_ms: float | None = None

    @property
    def is_enough(self) -> bool:
        """To plan with, where nothing else is known."""
        return self.base_ms is not None and self.prefill_token_ms is not None

    def over(self, profile: CostProfile) -> CostProfile:
        typed = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(profile, **{name: ms for name, ms in typed.items() if ms is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanges:
    """None: as it is known, or the node programs' default."""

    figures: TypedFigures = TypedFigures()
    prefill_speed: float = 1.0
    decode_speed: float = 1.0
    kv_memory_gb: float | None = None
    kv_bytes_per_token: int | None = None
    max_running: int | None = None
    step_budget_ms: float | None = None


def known_nodes(
    *, coordinator: str | None, profile: Path | None, figures: TypedFigures
) -> KnownNodes:
    """Raises ValueError, OSError, GenerationError."""
    if coordinator is not None and profile is not None:
        raise ValueError("--coordinator and --profile exclude each other")
    if coordinator is not None:
        return asyncio.run(read_cluster(coordinator))
    if profile is not None:
        file = read_profile_file(profile)
        return _known(file.profile, file.block_size, file.kv_bytes_per_token)
    if not figures.is_enough:
        raise ValueError(
            "what are the nodes? --profile, --coordinator, or at least --base-ms and --token-ms"
        )
    return _known(_NOTHING, _BLOCK_SIZE, None)


def planned_cluster(
    known: KnownNodes, changes: NodeChanges, *, num_nodes: int, bandwidth_gbs: float
) -> ClusterModel:
    """All of them colocated, to be split. Raises ValueError."""
    bytes_per_token = changes.kv_bytes_per_token or known.kv_bytes_per_token
    if bytes_per_token is None:
        raise ValueError("--kv-bytes-per-token: needed, the profile does not tell")
    block_bytes = bytes_per_token * known.block_size
    return ClusterModel(
        num_prefill=0,
        num_decode=num_nodes,
        prefill=_changed(known.prefill, changes, changes.prefill_speed, block_bytes),
        decode=_changed(known.decode, changes, changes.decode_speed, block_bytes),
        block_size=known.block_size,
        kv_bytes_per_token=bytes_per_token,
        bandwidth_gbs=bandwidth_gbs,
    )


def with_all_threads(cluster: ClusterModel, path: Path) -> ClusterModel:
    """One colocated node with the threads and the memory of all. Raises ValueError, OSError."""
    node = replace(
        cluster.decode,
        profile=read_profile_file(path).profile,
        num_blocks=cluster.num_nodes * cluster.decode.num_blocks,
    )
    return replace(cluster, num_prefill=0, num_decode=1, decode=node)


def _known(profile: CostProfile, block_size: int, bytes_per_token: int | None) -> KnownNodes:
    # How many blocks there are is decided with the memory, below.
    node = NodeModel(profile=profile, num_blocks=0)
    return KnownNodes(
        prefill=node, decode=node, block_size=block_size, kv_bytes_per_token=bytes_per_token
    )


def _changed(node: NodeModel, changes: NodeChanges, speed: float, block_bytes: int) -> NodeModel:
    num_blocks = node.num_blocks
    if changes.kv_memory_gb is not None or not num_blocks:
        kv_memory_gb = changes.kv_memory_gb or DEFAULT_KV_GB
        num_blocks = int(kv_memory_gb * 1e9) // block_bytes
    if num_blocks < 2:
        raise ValueError(f"--kv-memory-gb: holds {num_blocks} blocks, at least 2 are needed")
    return replace(
        node,
        profile=faster(changes.figures.over(node.profile), speed),
        num_blocks=num_blocks,
        max_running=changes.max_running or node.max_running,
        step_budget_ms=changes.step_budget_ms or node.step_budget_ms,
    )
