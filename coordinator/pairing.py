"""Which nodes serve a request: a pure function of the registry's state.

    decode node:   room for the prompt now; then the lowest predicted ITL, then most blocks
    prefill node:  the same KV, little queued; then the earliest predicted first token
    local:         no prefill node, or none free soon and the decode node is sooner

Predictions come from what nodes report: their cost profile, what is queued, what is decoding.
None means: wait, nobody has room now.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.registry import NodeEntry
from engine.cost_model import StepShape, chunk_shape
from kvtransfer.layout import first_difference
from protos.errors import Reason, ServingError

# A prefill node is sent the next prompt when it has less than this to do: enough to keep it busy,
# little enough to keep the queue here, in fair order, and reservations short.
MAX_AHEAD_MS = 100.0
# A prompt that takes at most this share of what is ahead of it may go to a busy node: the node's
# scheduler lets it pass.
SHORT_SHARE = 0.5
MAX_OUTSTANDING = 16
# Least share of a decode step that prompts get.
MIN_PROMPT_SHARE = 0.1
# What a lane moves, for predictions.
LANE_BYTES_PER_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request takes: tokens to prefill now, and of prompt and output together at most.

    num_choices are generated from one prefill; max_num_tokens is of each.
    """

    num_prompt_tokens: int
    max_num_tokens: int
    num_choices: int = 1

    @property
    def num_tokens(self) -> int:
        """The prompt and the output of all choices, at most."""
        output = self.max_num_tokens - self.num_prompt_tokens
        return self.num_prompt_tokens + self.num_choices * output

    @property
    def is_one_token(self) -> bool:
        return self.num_choices == 1 and self.max_num_tokens == self.num_prompt_tokens + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """prefill is None: prefilled on the decode node, for that reason. decode is None: the first
    token is all there is to generate."""

    prefill: NodeEntry | None
    decode: NodeEntry | None
    reason: str


def choose_pair(
    nodes: Iterable[NodeEntry], need: Need, *, may_be_local: bool = True
) -> Pair | None:
    """may_be_local: also where there are prefill nodes.

    Raises ServingError when no node that is there could ever serve the request.
    """
    usable = [node for node in nodes if node.is_usable]
    decodes = [node for node in usable if not node.is_prefill]
    prefills = [node for node in usable if node.is_prefill and not node.is_refusing]
    if prefills and need.is_one_token:
        prefill = _soonest(_long_enough(prefills, need.max_num_tokens), need)
        return Pair(prefill=prefill, decode=None, reason="one token") if prefill else None
    if not decodes:
        raise ServingError(Reason.NO_NODES, "no decode node is serving", retry_after_s=1.0)
    decodes = _long_enough(decodes, need.max_num_tokens)
    prefills = prefills and _long_enough(prefills, need.num_prompt_tokens + 1)
    if need.num_choices > 1:
        decodes = _large_enough(decodes, need)
    if prefills:
        decodes = _with_a_match(decodes, prefills)
    roomy = [node for node in decodes if has_room(node, need)]
    decode = min(roomy, key=lambda node: _decode_score(node, need), default=None)
    if decode is None:
        return None
    if not prefills:
        return Pair(prefill=None, decode=decode, reason="no prefill node")
    matching = [node for node in prefills if _same_kv(node, decode)]
    prefill = _soonest(matching, need)
    local_ms = local_first_token_ms(decode, need)
    if prefill is not None:
        is_local = may_be_local and prefill.ahead_ms > 0 and _is_short(decode, need)
        if is_local and local_ms < remote_first_token_ms(prefill, need):
            return Pair(prefill=None, decode=decode, reason="short prompt, prefill busy")
        return Pair(prefill=prefill, decode=decode, reason="paired")
    if may_be_local and all(local_ms < remote_first_token_ms(node, need) for node in matching):
        return Pair(prefill=None, decode=decode, reason="prefill saturated")
    return None


def has_room(node: NodeEntry, need: Need) -> bool:
    """Blocks for the prompt and the next tokens of each choice, beside a growing batch."""
    running = node.num_running + node.num_held
    blocks = blocks_now(node, need)
    headroom = min(running, node.num_blocks - blocks)
    return (
        node.available_blocks - node.held_blocks >= blocks + headroom
        and running + need.num_choices <= max(node.max_running, need.num_choices)
        and not node.is_refusing
    )


def blocks_now(node: NodeEntry, need: Need) -> int:
    """What the request takes of the node before it has generated anything."""
    layout = node.layout
    return layout.blocks_for(need.num_prompt_tokens + 1) + 2 * (need.num_choices - 1)


def predicted_itl_ms(node: NodeEntry, need: Need) -> float:
    """Of the node's streams once the request is one of them."""
    rows = node.num_decoding + node.num_held + need.num_choices
    context = node.decode_context + need.num_choices * need.num_prompt_tokens
    return node.profile.predict_ms(StepShape(num_decode_rows=rows, decode_context=context))


def remote_first_token_ms(node: NodeEntry, need: Need) -> float:
    """Until the first token is drawn there and the KV has arrived elsewhere."""
    layout = node.layout
    # Only the last chunk's transfer is not hidden behind compute.
    transfer_ms = layout.block_bytes * min(16, layout.blocks_for(need.num_prompt_tokens))
    return node.ahead_ms + _prefill_ms(node, need) + transfer_ms / LANE_BYTES_PER_MS


def local_first_token_ms(node: NodeEntry, need: Need) -> float:
    """Until it is drawn on a decode node, whose steps keep the ITL budget."""
    step_ms = _decode_step_ms(node)
    free = max(MIN_PROMPT_SHARE, 1.0 - step_ms / node.step_budget_ms)
    return (node.ahead_ms + _prefill_ms(node, need)) / free


def _soonest(prefills: Iterable[NodeEntry], need: Need) -> NodeEntry | None:
    free = [node for node in prefills if _takes(node, need)]
    return min(free, key=lambda node: remote_first_token_ms(node, need), default=None)


def _takes(node: NodeEntry, need: Need) -> bool:
    if node.num_outstanding >= MAX_OUTSTANDING:
        return False
    ahead_ms = node.ahead_ms
    is_short = _prefill_ms(node, need) <= SHORT_SHARE * ahead_ms
    return node.num_outstanding == 0 or ahead_ms <= MAX_AHEAD_MS or is_short


def _decode_score(node: NodeEntry, need: Need) -> tuple[float, int]:
    return predicted_itl_ms(node, need), node.held_blocks - node.available_blocks


def _is_short(decode: NodeEntry, need: Need) -> bool:
    """The whole prompt fits one step within the ITL budget."""
    return _decode_step_ms(decode) + _prefill_ms(decode, need) <= decode.step_budget_ms


def _prefill_ms(node: NodeEntry, need: Need) -> float:
    shape = chunk_shape(0, need.num_prompt_tokens)
    return node.profile.predict_ms(shape) - node.profile.base_ms


def _decode_step_ms(node: NodeEntry) -> float:
    if node.num_decoding == 0:
        return 0.0
    shape = StepShape(num_decode_rows=node.num_decoding, decode_context=node.decode_context)
    return node.profile.predict_ms(shape)


def _long_enough(nodes: list[NodeEntry], num_tokens: int) -> list[NodeEntry]:
    able = [node for node in nodes if node.max_model_len >= num_tokens]
    if not able:
        raise ServingError(
            Reason.CONTEXT_TOO_LONG,
            f"{num_tokens} tokens are more than any node takes",
            limit=max(node.max_model_len for node in nodes),
        )
    return able


def _large_enough(nodes: list[NodeEntry], need: Need) -> list[NodeEntry]:
    """Those whose pool could hold every choice at its end."""

    def blocks_at_end(node: NodeEntry) -> int:
        output = node.layout.blocks_for(need.max_num_tokens - need.num_prompt_tokens) + 1
        return node.layout.blocks_for(need.num_prompt_tokens) + need.num_choices * output

    able = [node for node in nodes if blocks_at_end(node) <= node.num_blocks]
    if not able:
        raise ServingError(
            Reason.CONTEXT_TOO_LONG,
            f"n: {need.num_choices} choices need {blocks_at_end(nodes[0])} KV blocks in the end, "
            f"nodes have up to {max(node.num_blocks for node in nodes)}",
            field="n",
            limit=max(node.num_blocks for node in nodes),
        )
    return able


def _with_a_match(decodes: list[NodeEntry], prefills: list[NodeEntry]) -> list[NodeEntry]:
    matched = [node for node in decodes if any(_same_kv(other, node) for other in prefills)]
    if not matched:
        difference = first_difference(prefills[0].layout, decodes[0].layout)
        raise ServingError(
            Reason.LAYOUT_MISMATCH,
            f"prefill and decode nodes differ in {difference}",
            field=str(difference).partition(":")[0],
        )
    return matched


def _same_kv(prefill: NodeEntry, decode: NodeEntry) -> bool:
    return first_difference(prefill.layout, decode.layout) is None
