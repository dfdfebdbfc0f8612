"""Which nodes could serve a request at all, and which have room for it now. Pure.

What no node could ever serve is refused by name, with the limit that it is over.
"""

from collections.abc import Iterable

from coordinator.need import Need
from coordinator.registry import NodeEntry
from kvtransfer.layout import first_difference
from protos.errors import Reason, ServingError


def check_served(nodes: Iterable[NodeEntry], need: Need) -> None:
    """Raises ServingError (NO_NODES) where nobody is there who could serve it now or later."""
    is_one_token = need.is_one_token
    for node in nodes:
        if node.is_usable and (not node.is_prefill or (is_one_token and not node.is_refusing)):
            return
    raise ServingError(Reason.NO_NODES, "no decode node is serving", retry_after_s=1.0)


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


def long_enough(nodes: list[NodeEntry], num_tokens: int) -> list[NodeEntry]:
    """Those that take so many tokens. Raises ServingError (CONTEXT_TOO_LONG)."""
    able = [node for node in nodes if node.max_model_len >= num_tokens]
    if not able:
        raise ServingError(
            Reason.CONTEXT_TOO_LONG,
            f"{num_tokens} tokens are more than any node takes",
            limit=max(node.max_model_len for node in nodes),
        )
    return able


def large_enough(nodes: list[NodeEntry], need: Need) -> list[NodeEntry]:
    """Those whose pool could hold every choice at its end. Raises ServingError."""

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


def with_a_match(decodes: list[NodeEntry], prefills: Iterable[NodeEntry]) -> list[NodeEntry]:
    """Those that take in the KV of a prefill node. Raises ServingError (LAYOUT_MISMATCH)."""
    kinds = {node.kv_kind: node for node in prefills}
    matched = [node for node in decodes if node.kv_kind in kinds]
    if not matched:
        difference = first_difference(next(iter(kinds.values())).layout, decodes[0].layout)
        raise ServingError(
            Reason.LAYOUT_MISMATCH,
            f"prefill and decode nodes differ in {difference}",
            field=str(difference).partition(":")[0],
        )
    return matched
