"""What is planned: how many nodes of which kind, what connects them, what serves them.

Values only. A colocated deployment has no prefill nodes. Where profiles come from is in
bench/plan/profiles.py.
"""

from dataclasses import dataclass, field, replace

from bench.plan.overheads import Overheads
from engine.cost_model import CostProfile
from kvtransfer.layout import KvLayout

# An element of K and one of V in bfloat16: what a head of size 1 takes per token.
_BYTES_PER_ELEMENT_PAIR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModel:
    """One node: its cost profile, its pool and its limits, as its flags set them."""

    profile: CostProfile
    num_blocks: int
    max_model_len: int = 32768
    max_running: int = 64
    step_budget_ms: float = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel:
    """num_prefill and num_decode nodes. Blocks of block_size tokens of kv_bytes_per_token cross a
    link of bandwidth_gbs (10^9 bytes per second), which each node has one of in each direction.

    may_be_local: decode nodes may prefill where there are prefill nodes (--local-prefill auto).
    """

    num_prefill: int
    num_decode: int
    prefill: NodeModel
    decode: NodeModel
    block_size: int = 16
    kv_bytes_per_token: int = 4
    bandwidth_gbs: float = 1.2
    overheads: Overheads = field(default_factory=Overheads)
    may_be_local: bool = True
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.num_prefill < 0 or self.num_decode < 1:
            raise ValueError(f"{self.name}: needs 0 or more prefill nodes, 1 or more decode nodes")

    @property
    def name(self) -> str:
        """2P1D; or 3 colocated."""
        if not self.num_prefill:
            return f"{self.num_decode} colocated"
        return f"{self.num_prefill}P{self.num_decode}D"

    @property
    def num_nodes(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def layout(self) -> KvLayout:
        """One layer of one head that is as large as all of the model's."""
        return KvLayout(
            model="planned",
            model_digest="",
            dtype="bfloat16",
            block_size=self.block_size,
            num_layers=1,
            num_kv_heads=1,
            head_dim=-(-self.kv_bytes_per_token // _BYTES_PER_ELEMENT_PAIR),
        )

    def split(self, *, num_prefill: int, num_decode: int) -> "ClusterModel":
        """The same machines in other roles."""
        return replace(self, num_prefill=num_prefill, num_decode=num_decode)
