"""What is served, by name: how many nodes of which role, with how many cores.

    "2P1D"            two prefill nodes, one decode node, one core each
    "1P1Dx4"          the same split with four cores per node
    "colocated 1x2"   one node that does both, with two threads
    "colocated 2x1"   two such nodes with one thread each

Deployments that are compared have the same cores and the same KV memory in all.
"""

import re
from dataclasses import dataclass

_SPLIT = re.compile(r"(\d+)P(\d+)D(?:x(\d+))?", re.IGNORECASE)
_COLOCATED = re.compile(r"colocated\s+(\d+)x(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Nodes of a cluster. With no prefill node it is colocated; threads are of each node."""

    num_prefill: int
    num_decode: int
    threads: int = 1

    def __post_init__(self) -> None:
        if self.num_decode < 1 or self.threads < 1:
            raise ValueError(f"{self.name}: needs a node that decodes, and a thread per node")

    @property
    def name(self) -> str:
        if self.is_colocated:
            return f"colocated {self.num_decode}x{self.threads}"
        suffix = f"x{self.threads}" if self.threads > 1 else ""
        return f"{self.num_prefill}P{self.num_decode}D{suffix}"

    @property
    def is_colocated(self) -> bool:
        return self.num_prefill == 0

    @property
    def num_nodes(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def num_cores(self) -> int:
        return self.num_nodes * self.threads

    def node_options(self, *, kv_memory_gb: float) -> dict[str, object]:
        """Flags of each node, when all of them share so much KV memory."""
        return {"threads": self.threads, "kv_memory_gb": kv_memory_gb / self.num_nodes}


def parse_deployment(name: str) -> Deployment:
    """Raises ValueError, one line, for a name that is none."""
    if match := _SPLIT.fullmatch(name.strip()):
        num_prefill, num_decode, threads = (int(part or 1) for part in match.groups())
        return Deployment(num_prefill=num_prefill, num_decode=num_decode, threads=threads)
    if match := _COLOCATED.fullmatch(name.strip()):
        return Deployment(num_prefill=0, num_decode=int(match[1]), threads=int(match[2]))
    raise ValueError(f"{name!r} is no deployment; they are called 2P1D, 1P1Dx4 or colocated 1x2")


def baselines(deployment: Deployment, *, is_emulated: bool) -> tuple[Deployment, ...]:
    """Colocated serving with the same cores: one node with all of them, and one node per core.

    Emulated nodes are as fast with one thread as with ten, so that one node with all cores would
    be given a fraction of the speed: they are compared with as many nodes of the same threads. A
    colocated deployment has no baselines: it is compared with peers.
    """
    if deployment.is_colocated:
        return ()
    if is_emulated:
        return (
            Deployment(num_prefill=0, num_decode=deployment.num_nodes, threads=deployment.threads),
        )
    whole = Deployment(num_prefill=0, num_decode=1, threads=deployment.num_cores)
    split = Deployment(num_prefill=0, num_decode=deployment.num_cores)
    return tuple(dict.fromkeys((whole, split)))


def splits(num_nodes: int, *, threads: int = 1) -> tuple[Deployment, ...]:
    """Every P:D ratio of so many nodes, and all of them colocated first."""
    return tuple(
        Deployment(num_prefill=num_prefill, num_decode=num_nodes - num_prefill, threads=threads)
        for num_prefill in range(num_nodes)
    )
