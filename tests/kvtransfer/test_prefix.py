"""Block hashes, against SHA-256 over bytes that are laid out by hand."""

import hashlib
from dataclasses import replace

import pytest

from kvtransfer.layout import KvLayout
from kvtransfer.prefix import PrefixChain, prompt_chain, reusable_blocks, short_hash

LAYOUT = KvLayout(
    model="toy",
    model_digest="0f",
    dtype="float32",
    block_size=2,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_a_hash_is_over_its_parent_and_its_tokens_from_a_root_of_model_and_salt():
    root = sha(b"0f\0tenant")
    first = sha(root + b"\x01\0\0\0" + b"\x02\x01\0\0")
    second = sha(first + b"\0\0\0\0" + b"\xff\xff\xff\x7f")
    chain = PrefixChain(LAYOUT, salt=b"tenant")
    chain.extend([1, 258, 0, 2**31 - 1, 5], num_blocks=2)
    assert chain.hashes == [first, second]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 123])
def test_a_prompt_may_reuse_its_full_blocks_but_never_its_last_token(num_tokens: int):
    expected = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 123: 61}[num_tokens]
    assert reusable_blocks(num_tokens, block_size=2) == expected
    assert len(prompt_chain(range(num_tokens), LAYOUT).hashes) == expected


def test_a_chain_that_grows_is_the_chain_of_the_whole():
    tokens = list(range(40, 53))
    grown = PrefixChain(LAYOUT)
    for num_tokens in (1, 2, 5, 5, 12, 13):
        grown.extend(tokens[:num_tokens], num_blocks=num_tokens // 2)
    assert grown.hashes == prompt_chain(tokens, LAYOUT).hashes


def test_a_fork_goes_on_by_itself():
    chain = prompt_chain([1, 2, 3], LAYOUT)
    fork = chain.fork()
    fork.extend([1, 2, 3, 4], num_blocks=2)
    chain.extend([1, 2, 3, 5], num_blocks=2)
    assert chain.hashes[0] == fork.hashes[0]
    assert chain.hashes[1] != fork.hashes[1]


@pytest.mark.parametrize(
    "other",
    [
        prompt_chain([1, 2, 3, 4, 6], LAYOUT, salt=b"b"),
        prompt_chain([1, 2, 3, 4, 6], replace(LAYOUT, model_digest="1f"), salt=b"a"),
        prompt_chain([0, 2, 3, 4, 6], LAYOUT, salt=b"a"),
        prompt_chain([1, 2, 3, 4, 6], replace(LAYOUT, block_size=1), salt=b"a"),
    ],
    ids=["tenant", "model", "first token", "block size"],
)
def test_what_differs_anywhere_before_has_other_hashes(other: PrefixChain):
    chain = prompt_chain([1, 2, 3, 4, 6], LAYOUT, salt=b"a")
    assert not set(chain.hashes) & set(other.hashes)


def test_coordinators_hear_the_first_eight_bytes():
    assert short_hash(bytes(range(1, 33))) == 0x0102030405060708
