"""What a full block stands for: a hash of its tokens and of all tokens before it.

    root  = SHA-256(model digest, tenant salt)
    hash  = SHA-256(hash of the block before (root), the block's ids as little-endian int32)

Two blocks of one hash hold the KV of the same prefix, under the same model, for the same tenant;
what is equal for somebody with another salt has another hash. Pure; a chain has one owner at a
time.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

from kvtransfer.layout import KvLayout


class PrefixChain:
    """hashes of the full blocks of a sequence that grows; each block is hashed once."""

    def __init__(self, layout: KvLayout, *, salt: bytes = b"") -> None:
        self._block_size = layout.block_size
        # The digest is text: it never holds the byte that ends it here.
        self._root = hashlib.sha256(layout.model_digest.encode() + b"\0" + salt).digest()
        self.hashes: list[bytes] = []

    def extend(self, token_ids: Sequence[int], *, num_blocks: int) -> None:
        """Makes hashes reach num_blocks blocks: token_ids are those of before, and more."""
        start, end = len(self.hashes) * self._block_size, num_blocks * self._block_size
        assert end <= len(token_ids)
        ids = memoryview(_packed(token_ids[start:end]))
        parent = self.hashes[-1] if self.hashes else self._root
        for offset in range(0, len(ids), 4 * self._block_size):
            block = ids[offset : offset + 4 * self._block_size]
            parent = hashlib.sha256(parent + block).digest()
            self.hashes.append(parent)

    def fork(self) -> "PrefixChain":
        """The same chain, to go on with other tokens."""
        other = PrefixChain.__new__(PrefixChain)
        other._block_size, other._root = self._block_size, self._root
        other.hashes = self.hashes.copy()
        return other


def reusable_blocks(num_tokens: int, *, block_size: int) -> int:
    """Leading blocks that a prompt may find in a cache: its full ones, but for the last token,
    which is always computed."""
    return max(0, num_tokens - 1) // block_size


def prompt_chain(token_ids: Sequence[int], layout: KvLayout, *, salt: bytes = b"") -> PrefixChain:
    """The chain of the blocks that a prompt may find in a cache."""
    chain = PrefixChain(layout, salt=salt)
    num_blocks = reusable_blocks(len(token_ids), block_size=layout.block_size)
    chain.extend(token_ids, num_blocks=num_blocks)
    return chain


def short_hash(block_hash: bytes) -> int:
    """What coordinators are told of a block: enough for a hint."""
    return int.from_bytes(block_hash[:8], "big")


def _packed(token_ids: Sequence[int]) -> bytes:
    packed = array("i", token_ids)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
