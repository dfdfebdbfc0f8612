"""What a run is put on, by the options of the command: a coordinator, a server's URL, or a cluster
that is started here and pinned, and stops with the run."""

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.deployment import Deployment
from bench.targets import OpenAITarget, OurTarget, Target, pin
from coordinator.supervisor import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A deployment of a model; None of the memory is the nodes' own choice."""

    deployment: Deployment
    model: str
    kv_memory_gb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A coordinator's address; or, with served_model, the URL of an OpenAI-compatible server."""

    address: str
    served_model: str = ""


Where = LocalCluster | Remote


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """facts are for the summary."""

    name: str
    target: Target
    facts: dict[str, object] = field(default_factory=dict)


@asynccontextmanager
async def open_target(where: Where) -> AsyncIterator[Opened]:
    """Raises ChildFailed when the cluster does not start."""
    if isinstance(where, Remote):
        opened = _open_remote(where)
        try:
            yield opened
        finally:
            await opened.target.close()
        return
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as log_dir:
        async with _cluster(where, Path(log_dir)) as cluster:
            pinning = pin(cluster, threads=where.deployment.threads)
            metrics = {
                name: child.metrics_address
                for name, child in cluster.processes.items()
                if child.metrics_address
            }
            target = OurTarget(cluster.address, metrics=metrics)
            facts: dict[str, object] = {
                "target": f"{where.deployment.name}, {where.model}",
                "pinning": f"{pinning}; client on {_own_cores()}",
            }
            try:
                yield Opened(name=where.deployment.name, target=target, facts=facts)
            finally:
                await target.close()


def _open_remote(where: Remote) -> Opened:
    target: Target
    if where.served_model:
        target = OpenAITarget(where.address, model=where.served_model)
    else:
        target = OurTarget(where.address)
    facts: dict[str, object] = {
        "target": where.address,
        "pinning": f"client on {_own_cores()}",
    }
    return Opened(name=where.address, target=target, facts=facts)


def _cluster(where: LocalCluster, log_dir: Path) -> Cluster:
    deployment = where.deployment
    options: dict[str, object] = {"threads": deployment.threads}
    if where.kv_memory_gb is not None:
        options = deployment.node_options(kv_memory_gb=where.kv_memory_gb)
    options["metrics_listen"] = "127.0.0.1:0"
    return Cluster(
        model=where.model,
        num_prefill=deployment.num_prefill,
        num_decode=deployment.num_decode,
        node_options=options,
        log_dir=log_dir,
    )


def _own_cores() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))
