"""What a KV block holds, and whether one node can take in another's.

    block_shape   the logical shape, always [L, 2, H, S, D]
    inner_shape   the same dimensions as they lie in memory, in inner_order

Nodes may cut and order their blocks differently: kvtransfer/chunk_bytes.py translates.
"""

import hashlib
import math
from dataclasses import asdict, dataclass, fields

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# Dimensions inside one block: layer, K or V, kv head, slot, head dim.
DEFAULT_INNER_ORDER = "L2HSD"
# In what a lane can translate between two nodes.
_TRANSLATED = ("block_size", "inner_order")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape and meaning of a KV block: all layers, K and V, of block_size tokens, contiguous.

    model and model_digest say whose KV it is; head_start is the first kv head of a node that
    holds only num_kv_heads of the model's. inner_order is any order of the letters of L2HSD.
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
        if sorted(self.inner_order) != sorted(DEFAULT_INNER_ORDER):
            raise ValueError(
                f"inner_order: {self.inner_order!r} is not an order of {DEFAULT_INNER_ORDER}"
            )

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, 2, num_kv_heads, block_size, head_dim]."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """block_shape as it lies in memory, outermost first: L2SHD swaps heads and slots."""
        sizes = dict(zip(DEFAULT_INNER_ORDER, self.block_shape, strict=True))
        return tuple(sizes[letter] for letter in self.inner_order)

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

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal exactly for layouts that a lane can translate into each other."""
        names = (field.name for field in fields(self) if field.name not in _TRANSLATED)
        return tuple(getattr(self, name) for name in names)


def first_difference(ours: KvLayout, theirs: KvLayout) -> str | None:
    """The first field that keeps theirs from being taken in, as "field: ours != theirs"; or None.

    block_size and inner_order may differ: they are what a lane can translate.
    """
    theirs_fields = asdict(theirs)
    for name, value in asdict(ours).items():
        if name not in _TRANSLATED and value != theirs_fields[name]:
            return f"{name}: {value} != {theirs_fields[name]}"
    return None
