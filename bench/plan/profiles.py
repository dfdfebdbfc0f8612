"""Where a plan's node models come from: a profile's file, or a cluster that runs.

bench/profiles/*.json (python -m bench.cost_profile)   --> NodeModel
ListNodes of a coordinator: profiles as its nodes measured them at their start
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from bench.plan.cluster_model import NodeModel
from coordinator.events import read_generation_error
from engine.cost_model import CostProfile
from engine.cost_wire import cost_profile_from_pb
from kvtransfer.layout import KvLayout
from kvtransfer.wire import layout_from_pb
from protos.pd.v1 import cluster_pb2, cluster_pb2_grpc
from protos.serving import dial

_CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNodes:
    """What is known of the nodes to plan with. kv_bytes_per_token is None where nobody told."""

    prefill: NodeModel
    decode: NodeModel
    block_size: int
    kv_bytes_per_token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    profile: CostProfile
    block_size: int
    kv_bytes_per_token: int | None


def read_profile_file(path: Path) -> ProfileFile:
    """As python -m bench.cost_profile writes them. Raises ValueError, OSError."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        return ProfileFile(
            profile=CostProfile(**document["cost_profile"]),
            block_size=int(document.get("block_size", 16)),
            kv_bytes_per_token=document.get("kv_bytes_per_token"),
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no cost profile: {error!r}") from error


async def read_cluster(address: str) -> KnownNodes:
    """The models of a running cluster's nodes; of a role that has none, the other's.

    Raises GenerationError, and ValueError while no node has told its profile.
    """
    async with dial(address, purpose="plan") as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        try:
            response = await stub.ListNodes(cluster_pb2.ListNodesRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise read_generation_error(error) from error
    told = [info for info in response.nodes if info.status.HasField("cost_profile")]
    if not told:
        raise ValueError(f"{address}: no node has told its cost profile")
    layout = layout_from_pb(told[0].registration.layout)
    prefills = _of_role(told, cluster_pb2.NODE_ROLE_PREFILL)
    decodes = _of_role(told, cluster_pb2.NODE_ROLE_DECODE)
    return KnownNodes(
        prefill=_slowest(prefills or decodes),
        decode=_slowest(decodes or prefills),
        block_size=layout.block_size,
        kv_bytes_per_token=bytes_per_token(layout),
    )


def bytes_per_token(layout: KvLayout) -> int:
    return layout.block_bytes // layout.block_size


def faster(profile: CostProfile, factor: float) -> CostProfile:
    """Every step takes 1 / factor of its time."""
    return CostProfile(
        base_ms=profile.base_ms / factor,
        decode_row_ms=profile.decode_row_ms / factor,
        prefill_token_ms=profile.prefill_token_ms / factor,
        decode_context_ms=profile.decode_context_ms / factor,
        prefill_context_ms=profile.prefill_context_ms / factor,
    )


def _of_role(nodes: Sequence[cluster_pb2.NodeInfo], role: cluster_pb2.NodeRole) -> list[NodeModel]:
    return [
        NodeModel(
            profile=cost_profile_from_pb(node.status.cost_profile),
            num_blocks=node.registration.num_blocks,
            max_model_len=node.registration.max_model_len,
            max_running=node.registration.max_running,
            step_budget_ms=node.registration.step_budget_ms,
        )
        for node in nodes
        if node.registration.role == role
    ]


def _slowest(nodes: Sequence[NodeModel]) -> NodeModel:
    """One model for all nodes of a role promises nothing that one of them cannot keep."""
    return max(nodes, key=lambda node: node.profile.base_ms)
