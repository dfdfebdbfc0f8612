"""Which nodes serve a request: a pure function of the registry's state.

Decode: the node with most available blocks. Prefill: the node with fewest outstanding prompt
tokens, among those whose KV layout the decode node shares. Without prefill nodes the decode node
prefills by itself. None means: wait, nobody has room now.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.registry import NodeEntry
from kvtransfer.layout import first_difference
from protos.errors import Reason, ServingError

# Prompts that a prefill node may have from one coordinator: enough to keep it busy, few enough to
# keep the queue here and reservations short.
MAX_OUTSTANDING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request takes: tokens of its prompt, and of prompt and output together."""

    num_prompt_tokens: int
    max_num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """prefill is None: prefilled on the decode node, for that reason. decode is None: the first
    token is all there is to generate."""

    prefill: NodeEntry | None
    decode: NodeEntry | None
    reason: str


def choose_pair(nodes: Iterable[NodeEntry], need: Need) -> Pair | None:
    """Raises ServingError when no node that is there could ever serve the request."""
    serving = [node for node in nodes if node.is_serving]
    prefills = [node for node in serving if node.is_prefill]
    decodes = [node for node in serving if not node.is_prefill]
    if not decodes:
        raise ServingError(Reason.NO_NODES, "no decode node is serving", retry_after_s=1.0)
    decodes = _long_enough(decodes, need.max_num_tokens)
    prefills = prefills and _long_enough(prefills, need.num_prompt_tokens + 1)
    if not prefills:
        decode = _most_available(decodes, need)
        if decode is None:
            return None
        return Pair(prefill=None, decode=decode, reason="no prefill node")
    fitting = {id(decode): _same_layout(prefills, decode) for decode in decodes}
    if not any(fitting.values()):
        difference = first_difference(prefills[0].layout, decodes[0].layout)
        raise ServingError(
            Reason.LAYOUT_MISMATCH,
            f"prefill and decode nodes differ in {difference}",
            field=str(difference).partition(":")[0],
        )
    paired = [decode for decode in decodes if fitting[id(decode)]]
    is_one_token = need.max_num_tokens == need.num_prompt_tokens + 1
    decode = None if is_one_token else _most_available(paired, need)
    if decode is None and not is_one_token:
        return None
    prefill = _least_loaded(fitting[id(decode)] if decode else prefills)
    if prefill is None:
        return None
    return Pair(prefill=prefill, decode=decode, reason="paired")


def _most_available(nodes: Iterable[NodeEntry], need: Need) -> NodeEntry | None:
    def available(node: NodeEntry) -> int:
        return node.available_blocks - node.held_blocks

    room = [
        node
        for node in nodes
        if available(node) >= node.layout.blocks_for(need.max_num_tokens)
        and node.num_running + node.num_held < node.max_running
        and not node.is_refusing
    ]
    return max(room, key=available, default=None)


def _long_enough(nodes: list[NodeEntry], num_tokens: int) -> list[NodeEntry]:
    able = [node for node in nodes if node.max_model_len >= num_tokens]
    if not able:
        raise ServingError(
            Reason.CONTEXT_TOO_LONG,
            f"{num_tokens} tokens are more than any node takes",
            limit=max(node.max_model_len for node in nodes),
        )
    return able


def _least_loaded(nodes: Iterable[NodeEntry]) -> NodeEntry | None:
    room = [node for node in nodes if node.num_outstanding < MAX_OUTSTANDING]
    return min(room, key=lambda node: node.outstanding_tokens, default=None)


def _same_layout(prefills: Iterable[NodeEntry], decode: NodeEntry) -> list[NodeEntry]:
    return [node for node in prefills if first_difference(node.layout, decode.layout) is None]
