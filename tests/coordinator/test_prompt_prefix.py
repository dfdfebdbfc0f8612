"""A prompt's hashes: those that nodes compute for the same tokens, tenant and model."""

from dataclasses import replace

import pytest

from coordinator.prompt_prefix import PromptPrefix, tenant_salt
from kvtransfer.layout import KvLayout
from kvtransfer.prefix import prompt_chain, short_hash

LAYOUT = KvLayout(
    model="m",
    model_digest="00",
    dtype="float32",
    block_size=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
TOKENS = tuple(range(100, 123))


def hashes(num_tokens: int, *, tenant: str = "a", layout: KvLayout = LAYOUT, **salt: bool):
    salt_of = tenant_salt(tenant, is_shared=salt.get("is_shared", False))
    return list(PromptPrefix(salt=salt_of).hashes(TOKENS[:num_tokens], layout))


# The last token is always computed: 4 tokens have no block to find, 5 have one.
@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_prompt_has_the_hashes_of_the_blocks_that_it_may_find(num_tokens, num_blocks):
    of_node = prompt_chain(
        TOKENS[:num_tokens], LAYOUT, salt=tenant_salt("a", is_shared=False)
    ).hashes
    assert hashes(num_tokens) == list(map(short_hash, of_node))
    assert len(of_node) == num_blocks


def test_a_longer_prompt_goes_on_from_the_same_hashes():
    prefix = PromptPrefix(salt=b"")
    short = list(prefix.hashes(TOKENS[:9], LAYOUT))
    assert list(prefix.hashes(TOKENS[:17], LAYOUT)) == hashes(17, is_shared=True)
    assert hashes(17, is_shared=True)[:2] == short


def test_tenants_models_and_block_sizes_have_hashes_of_their_own():
    mine = hashes(23)
    for other in (
        hashes(23, tenant="b"),
        hashes(23, tenant=""),
        hashes(23, layout=replace(LAYOUT, model_digest="01")),
        hashes(23, layout=replace(LAYOUT, block_size=8)),
        hashes(23, is_shared=True),
    ):
        assert not set(mine) & set(other)
    # What may differ between nodes that pair, and what a lane translates.
    assert hashes(23, layout=replace(LAYOUT, inner_order="2LSHD")) == mine


def test_a_shared_cache_has_no_salt():
    assert hashes(23, tenant="a", is_shared=True) == hashes(23, tenant="b", is_shared=True)
    assert tenant_salt("a", is_shared=True) == b""


def test_chains_of_two_block_sizes_are_kept_apart():
    prefix = PromptPrefix(salt=b"")
    of_8 = replace(LAYOUT, block_size=8)
    assert len(prefix.hashes(TOKENS, LAYOUT)) == 5
    assert len(prefix.hashes(TOKENS, of_8)) == 2
    assert list(prefix.hashes(TOKENS, of_8)) == hashes(23, layout=of_8, is_shared=True)
