"""What each node would do for a request: a node's cost profile over what it has told.

    prefill node:  what is ahead there + compute of what it has not cached (+ transfer that shows)
    decode node:   its step with one stream more; the same prompt, in what its steps have left over

Made once for a decision, in which every prefill node is paired with every decode node. Pure; all
times in milliseconds.
"""

from dataclasses import dataclass

from coordinator.need import Need
from coordinator.registry import NodeEntry
from engine.cost_model import StepShape, chunk_shape

# Least share of a decode step that prompts get.
MIN_PROMPT_SHARE = 0.1
# What a lane moves.
LANE_BYTES_PER_MS = 1e6
# What is shipped after all compute has ended.
LAST_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOffer:
    """num_cached prompt tokens are there, which saves saved_ms of compute. drawn_ms: until the
    first token is drawn."""

    node: NodeEntry
    num_cached: int
    compute_ms: float
    saved_ms: float
    drawn_ms: float
    block_ms: float
    num_blocks: int

    def first_token_ms(self, *, num_cached_there: int = 0) -> float:
        """Until it is drawn and the KV has arrived on a node that has num_cached_there tokens.

        Blocks are shipped beside the compute, but for the last chunk.
        """
        num_missing = self.num_blocks - num_cached_there // self.node.layout.block_size
        last = min(self.node.layout.blocks_for(LAST_CHUNK_TOKENS), num_missing)
        shown_ms = max(last * self.block_ms, num_missing * self.block_ms - self.compute_ms)
        return self.drawn_ms + shown_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOffer:
    """itl_ms: of the node's streams once the request is one of them. local_ms: until it has drawn
    the first token itself. is_short: what is not cached fits one step within the ITL budget."""

    node: NodeEntry
    num_cached: int
    saved_ms: float
    itl_ms: float
    local_ms: float
    is_short: bool


def prefill_offer(node: NodeEntry, need: Need) -> PrefillOffer:
    num_cached = cached_tokens(node, need)
    compute_ms = _compute_ms(node, need, start=num_cached)
    return PrefillOffer(
        node=node,
        num_cached=num_cached,
        compute_ms=compute_ms,
        saved_ms=_compute_ms(node, need) - compute_ms if num_cached else 0.0,
        drawn_ms=node.ahead_ms + compute_ms,
        block_ms=node.layout.block_bytes / LANE_BYTES_PER_MS,
        num_blocks=node.layout.blocks_for(need.num_prompt_tokens),
    )


def decode_offer(node: NodeEntry, need: Need) -> DecodeOffer:
    num_cached = cached_tokens(node, need)
    compute_ms = _compute_ms(node, need, start=num_cached)
    step_ms = _decode_step_ms(node)
    # The node's steps keep the ITL budget: a prompt gets what its streams leave of it.
    free = max(MIN_PROMPT_SHARE, 1.0 - step_ms / node.step_budget_ms)
    return DecodeOffer(
        node=node,
        num_cached=num_cached,
        saved_ms=_compute_ms(node, need) - compute_ms if num_cached else 0.0,
        itl_ms=_itl_ms(node, need),
        local_ms=(node.ahead_ms + compute_ms) / free,
        is_short=step_ms + compute_ms <= node.step_budget_ms,
    )


def cached_tokens(node: NodeEntry, need: Need) -> int:
    """Prompt tokens that the node, as far as is known here, has: all but the last at most, because
    that one is computed to get the first token."""
    chain = need.block_hashes(node.layout)
    if not chain:
        return 0
    return min(node.index.longest(chain) * node.layout.block_size, need.num_prompt_tokens - 1)


def _compute_ms(node: NodeEntry, need: Need, *, start: int = 0) -> float:
    shape = chunk_shape(start, need.num_prompt_tokens - start)
    return node.profile.predict_ms(shape) - node.profile.base_ms


def _itl_ms(node: NodeEntry, need: Need) -> float:
    rows = node.num_decoding + node.num_held + need.num_choices
    context = node.decode_context + need.num_choices * need.num_prompt_tokens
    return node.profile.predict_ms(StepShape(num_decode_rows=rows, decode_context=context))


def _decode_step_ms(node: NodeEntry) -> float:
    if node.num_decoding == 0:
        return 0.0
    shape = StepShape(num_decode_rows=node.num_decoding, decode_context=node.decode_context)
    return node.profile.predict_ms(shape)
