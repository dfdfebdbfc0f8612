"""A prompt's hash chain, as nodes of each layout cut it: computed when pairing first asks.

    tenant --tenant_salt--> salt --+
    tokens, a node's layout -------+--> hashes of the blocks that may be cached

One per request. A request that goes on after a break has the same chain, longer by what it has
generated. Runs on the event loop.
"""

import hashlib
from collections.abc import Sequence

from kvtransfer.layout import KvLayout
from kvtransfer.prefix import PrefixChain, reusable_blocks, short_hash

_DOMAIN = b"disagg prefix cache, tenant\0"


def tenant_salt(tenant: str, *, is_shared: bool) -> bytes:
    """What keeps a tenant's blocks from being found by others; nothing if all share them."""
    return b"" if is_shared else hashlib.sha256(_DOMAIN + tenant.encode()).digest()


class PromptPrefix:
    """The chains of one request."""

    def __init__(self, *, salt: bytes) -> None:
        self.salt = salt
        self._chains: dict[tuple[str, int], tuple[PrefixChain, list[int]]] = {}

    def hashes(self, token_ids: Sequence[int], layout: KvLayout) -> Sequence[int]:
        """Short hashes of the blocks that a node of this layout may have of token_ids, which are
        those of the last time and maybe more."""
        key = layout.model_digest, layout.block_size
        if key not in self._chains:
            self._chains[key] = PrefixChain(layout, salt=self.salt), []
        chain, hashes = self._chains[key]
        num_blocks = reusable_blocks(len(token_ids), block_size=layout.block_size)
        if len(hashes) < num_blocks:
            chain.extend(token_ids, num_blocks=num_blocks)
            hashes.extend(map(short_hash, chain.hashes[len(hashes) :]))
        return hashes
