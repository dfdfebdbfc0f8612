"""What the plan says of a deployment that is measured: the same requests, SLO and memory.

    model, --profile --find_profile--> CostProfile --predictor--> Deployment -> goodput and its band

A profile is that of one node with the deployment's threads (python -m bench.cost_profile); emulated
models have their own.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from bench.deployment import Deployment
from bench.plan.cluster_model import ClusterModel, NodeModel
from bench.plan.predict import predict_goodput
from bench.ratio import Predict
from bench.recipe import Recipe
from bench.slo import Slo
from bench.workload import Workload
from engine.catalog import resolve_model
from engine.cost_model import CostProfile
from engine.served_model import ServedModel, find_model, pool_blocks

_MAX_RUNNING = 64
_BLOCK_SIZE = 16


def find_profile(model: str, path: Path | None) -> CostProfile | None:
    """Of the file; else the model's own; None where it has none. Raises ValueError."""
    folder = resolve_model(model, allow_download=False).folder
    source = path or folder / "config.json"
    fields = json.loads(source.read_text()).get("cost_profile")
    if fields is None and path is not None:
        raise ValueError(f"{path} has no cost_profile")
    return None if fields is None else CostProfile(**fields)


def predictor(
    *,
    model: str,
    kv_memory_gb: float,
    profile: CostProfile,
    recipe: Recipe,
    slo: Slo,
    start_per_s: float,
) -> Predict:
    """Predicts (mean, low, high) of a deployment's goodput over several seeds."""
    served = find_model(model, dtype="bfloat16", block_size=_BLOCK_SIZE)

    def predict(deployment: Deployment) -> tuple[float, float, float]:
        cluster = cluster_model(
            deployment, served=served, kv_memory_gb=kv_memory_gb, profile=profile
        )
        asked = _Asked(recipe=recipe.for_search(ttft_ms=slo.ttft_ms))
        found = predict_goodput(cluster, asked, slo=slo, start_per_s=start_per_s)
        return found.mean, found.low, found.high

    return predict


def cluster_model(
    deployment: Deployment, *, served: ServedModel, kv_memory_gb: float, profile: CostProfile
) -> ClusterModel:
    """The deployment as the plan sees it, with the flags that bench/contender.py starts it with."""
    node = NodeModel(
        profile=profile,
        num_blocks=pool_blocks(
            served,
            kv_memory_gb=kv_memory_gb / deployment.num_nodes,
            max_model_len=served.max_model_len,
            max_running=_MAX_RUNNING,
        ),
        max_model_len=served.max_model_len,
        max_running=_MAX_RUNNING,
    )
    return ClusterModel(
        num_prefill=deployment.num_prefill,
        num_decode=deployment.num_decode,
        prefill=node,
        decode=node,
        block_size=_BLOCK_SIZE,
        kv_bytes_per_token=served.layout.block_bytes // _BLOCK_SIZE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A recipe as the plan's demand."""

    recipe: Recipe

    def workload(self, *, rate_per_s: float, seed: int) -> Workload:
        return replace(self.recipe, rate_per_s=rate_per_s, seed=seed).workload()
