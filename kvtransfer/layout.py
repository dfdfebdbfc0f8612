"""What a KV block holds, and whether two nodes mean the same by it."""

import hashlib
import math
from dataclasses import asdict, dataclass

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# Dimensions inside one block: layer, K or V, kv head, slot, head dim.
DEFAULT_INNER_ORDER = "L2HSD"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape and meaning of a KV block: all layers, K and V, of block_size tokens, contiguous.

    model and model_digest say whose KV it is; head_start is the first kv head of a node that
    holds only num_kv_heads of the model's.
    """

    model: str
    model_digest: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_start: int = 0
    inner_order: str = DEFAULT_INNER_ORDER

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("block_size", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, 2, num_kv_heads, block_size, head_dim]."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def fingerprint(self) -> str:
        """Equal exactly for equal layouts."""
        text = repr(sorted(asdict(self).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_difference(ours: KvLayout, theirs: KvLayout) -> str | None:
    """The first field in which the layouts differ, as "field: ours != theirs"; None if equal."""
    theirs_fields = asdict(theirs)
    for name, value in asdict(ours).items():
        if value != theirs_fields[name]:
            return f"{name}: {value} != {theirs_fields[name]}"
    return None
