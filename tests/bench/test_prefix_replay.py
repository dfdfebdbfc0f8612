"""The replay on small made-up traces, whose hits can be counted by hand."""

import json
from pathlib import Path

import pytest

from bench.prefix_replay import replay, with_one_lru
from bench.replay.cache import LeafLru
from bench.replay.trace import TracedRequest, read_hashes


def hashes(*blocks: int) -> tuple[bytes, ...]:
    return tuple(block.to_bytes(8, "big") for block in blocks)


def request(arrival_s: float, *blocks: int, num_output_tokens: int = 2) -> TracedRequest:
    """Full blocks, and 100 tokens more."""
    return TracedRequest(
        arrival_s=arrival_s,
        num_prompt_tokens=512 * len(blocks) + 100,
        num_output_tokens=num_output_tokens,
        chain=hashes(*blocks),
    )


def test_a_trace_is_read_with_full_blocks_only_and_spread_arrivals(tmp_path: Path):
    rows = [(0, 1024, [1, 2]), (0, 1500, [1, 2, 3]), (3000, 511, [9])]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(
                {"timestamp": at, "input_length": length, "output_length": 7, "hash_ids": blocks}
            )
            for at, length, blocks in rows
        )
    )
    read = read_hashes(path)
    assert [one.arrival_s for one in read] == [0.0, 1.5, 3.0]
    assert [one.chain for one in read] == [hashes(1, 2), hashes(1, 2), ()]
    assert [one.num_prompt_tokens for one in read] == [1024, 1500, 511]


def test_the_one_lru_evicts_leaves_of_what_was_used_longest_ago():
    cache = LeafLru(4)
    cache.use(hashes(1, 2, 3))
    cache.use(hashes(7, 8))
    # 3 is gone.
    assert cache.longest(hashes(1, 2, 3)) == 2
    cache.use(hashes(1, 2))
    cache.use(hashes(5))
    # Then 8: the last of the chain that was used longest ago.
    assert cache.longest(hashes(7, 8)) == 1
    assert cache.longest(hashes(1, 2)) == 2


def test_one_lru_counts_tokens_but_never_the_last_one():
    exact = TracedRequest(
        arrival_s=0.0, num_prompt_tokens=1024, num_output_tokens=2, chain=hashes(1, 2)
    )
    num_hits, compute_s = with_one_lru([exact, exact], capacity=9)
    assert num_hits == 1023
    # 1024 tokens, then one: 0.1 ms each, and 2e-6 ms per attended position.
    assert compute_s == pytest.approx((102.5 + (524_800 + 1024) * 2e-6) / 1e3)


@pytest.mark.parametrize("num_prefill", [0, 1, 4])
def test_what_comes_again_later_is_found_on_as_many_nodes(num_prefill: int):
    # Eight prompts of four blocks, 1000 s apart, then all of them again.
    first = [
        request(1000.0 * index, *range(10 * index, 10 * index + 4), num_output_tokens=50)
        for index in range(8)
    ]
    again = [
        request(10_000.0 + one.arrival_s, *(10 * i + j for j in range(4)))
        for i, one in enumerate(first)
    ]
    outcome = replay(
        [*first, *again],
        num_prefill=num_prefill,
        num_decode=max(1, num_prefill),
        blocks_per_node=200,
        utilisation=0.1,
    )
    # Of 2148 tokens each, 2048 the second time.
    expected = 2048 / (2 * 2148)
    assert outcome.hit_rate == pytest.approx(expected)
    assert outcome.one_lru_hit_rate == pytest.approx(expected)
    assert sum(outcome.reasons.values()) == 16


def test_nodes_that_are_alike_compute_alike():
    trace = [request(float(i), 10 * i, 10 * i + 1) for i in range(16)]
    outcome = replay(trace, num_prefill=4, num_decode=4, blocks_per_node=100, utilisation=0.5)
    assert outcome.imbalance == 1.0
    assert outcome.hit_rate == 0.0
