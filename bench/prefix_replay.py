"""Block hashes of a trace through the coordinator's index and pairing: are caches found and shared?

    python -m bench.prefix_replay TRACE... [--nodes 1,4,16] [--blocks 2000] [--utilisation 0.6]

No model and no clock: prompts last as long as a cost profile says, and a node's cache evicts what
was used longest ago, leaves first. The decisions are the live ones: WaitingLine, choose_pair, Claim
and PrefixIndex. Once with so many prefill and as many decode nodes, and once with the decode nodes
alone.

Shown: prompt tokens that needed no compute, next to one LRU of the summed capacity of the nodes
that compute prompts; and how even it is over these nodes what they computed. A trace's time is
stretched so that they are busy with prompts for the given share of it, if they hit as often as that
one LRU.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.replay.cache import LeafLru
from bench.replay.cluster import PROFILE, SimulatedCluster
from bench.replay.trace import BLOCK_SIZE, TracedRequest, read_hashes
from engine.cost_model import chunk_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Rates are shares of all prompt tokens; imbalance is the most computed tokens of a node over
    their mean."""

    hit_rate: float
    one_lru_hit_rate: float
    imbalance: float
    mean_ttft_s: float
    mean_decision_ms: float
    reasons: dict[str, int]


def replay(
    trace: Sequence[TracedRequest],
    *,
    num_prefill: int,
    num_decode: int,
    blocks_per_node: int,
    utilisation: float,
) -> Outcome:
    """Raises ServingError if a request of the trace fits no node."""
    num_computing = num_prefill or num_decode
    num_hits, compute_s = with_one_lru(trace, capacity=num_computing * blocks_per_node)
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    stretch = compute_s / (num_computing * utilisation) / span_s
    cluster = SimulatedCluster(
        num_prefill=num_prefill, num_decode=num_decode, blocks_per_node=blocks_per_node
    )
    cluster.run([replace(request, arrival_s=request.arrival_s * stretch) for request in trace])
    num_tokens = sum(request.num_prompt_tokens for request in trace)
    computed = [node.uncached_tokens for node in cluster.nodes]
    return Outcome(
        hit_rate=1.0 - sum(computed) / num_tokens,
        one_lru_hit_rate=num_hits / num_tokens,
        imbalance=max(computed[:num_computing]) * num_computing / sum(computed[:num_computing]),
        mean_ttft_s=sum(cluster.ttfts_s) / len(trace),
        mean_decision_ms=1e3 * cluster.decided_s / cluster.num_decisions,
        reasons=dict(cluster.reasons),
    )


def with_one_lru(trace: Sequence[TracedRequest], *, capacity: int) -> tuple[int, float]:
    """Tokens found in one cache for all, and the seconds that it takes to compute the others."""
    cache, num_hits, compute_ms = LeafLru(capacity), 0, 0.0
    for request in trace:
        num_cached = cache.longest(request.chain) * BLOCK_SIZE
        num_cached = min(num_cached, request.num_prompt_tokens - 1)
        shape = chunk_shape(num_cached, request.num_prompt_tokens - num_cached)
        num_hits += num_cached
        compute_ms += PROFILE.predict_ms(shape) - PROFILE.base_ms
        cache.use(request.chain)
    return num_hits, compute_ms / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_replay")
    add = parser.add_argument
    add("traces", nargs="+", type=Path, metavar="TRACE")
    add("--nodes", default="1,4,16", help="of each role, separated by commas")
    add("--blocks", type=int, default=2000, help="of 512 tokens, in each node's cache")
    add("--utilisation", type=float, default=0.6)
    args = parser.parse_args()
    print("| trace | nodes | hit rate | one LRU | max / mean computed | mean TTFT | decision |")
    print("|--|--|--|--|--|--|--|")
    for path in args.traces:
        trace = read_hashes(path)
        for num_nodes in map(int, args.nodes.split(",")):
            for num_prefill in (num_nodes, 0):
                outcome = replay(
                    trace,
                    num_prefill=num_prefill,
                    num_decode=num_nodes,
                    blocks_per_node=args.blocks,
                    utilisation=args.utilisation,
                )
                nodes = f"{num_nodes} + {num_nodes}" if num_prefill else f"{num_nodes} colocated"
                print(f"| {path.stem} | {nodes} | {_row(outcome)} |", flush=True)


def _row(outcome: Outcome) -> str:
    return " | ".join(
        (
            f"{outcome.hit_rate:.1%}",
            f"{outcome.one_lru_hit_rate:.1%}",
            f"{outcome.imbalance:.2f}",
            f"{outcome.mean_ttft_s:.2f} s",
            f"{outcome.mean_decision_ms:.2f} ms",
        )
    )


if __name__ == "__main__":
    main()
