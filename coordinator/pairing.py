"""Which nodes serve a request: a pure function of the registry's state.

    every (prefill, decode) pair with the same KV and with room, and every decode node alone:
        predicted first token = queue + compute of what is not cached + transfer of what is missing
        - SAVED_WEIGHT * compute that its cache saves, for which others do not wait
        + ITL_WEIGHT * predicted ITL of the decode node's streams          the lowest is chosen

    a decode node alone counts    where there is no prefill node, or none free soon,
                                  or prefill nodes are busy and the prompt is short,
                                  or it has nearly all of the prompt cached

Predictions come from what nodes report (coordinator/offers.py). A node that has the prefix is
preferred for as long as its queue is worth it, and so a hot prefix spreads. None means: wait,
nobody has room now.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.able import check_served, has_room, large_enough, long_enough, with_a_match
from coordinator.need import Need
from coordinator.offers import DecodeOffer, PrefillOffer, decode_offer, prefill_offer
from coordinator.registry import NodeEntry

# A prefill node is sent the next prompt when it has less than this to do: enough to keep it busy,
# little enough to keep the queue here, in fair order, and reservations short.
MAX_AHEAD_MS = 100.0
# A prompt that takes at most this share of what is ahead of it may go to a busy node: the node's
# scheduler lets it pass.
SHORT_SHARE = 0.5
MAX_OUTSTANDING = 16
# A millisecond more between tokens weighs as much as so many until the first one.
ITL_WEIGHT = 64.0
# A millisecond of compute saved is worth one more of waiting: those who come later wait less too.
# In bench/prefix_replay.py a busy cluster without it computes prefixes anew that a short wait would
# have found, and everybody's first token is later.
SAVED_WEIGHT = 1.0
# Nearly all of a prompt.
MOST_OF_IT = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """prefill is None: prefilled on the decode node, for that reason. decode is None: the first
    token is all there is to generate. The cached tokens are predictions."""

    prefill: NodeEntry | None
    decode: NodeEntry | None
    reason: str
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Those that need no compute where the prompt is prefilled."""
        return self.prefill_cached_tokens if self.prefill else self.decode_cached_tokens


# Lower is better: milliseconds, and what decides between equals.
_Score = tuple[float, int, int, int]
_ByKind = Mapping[tuple[object, ...], list[PrefillOffer]]


@dataclass(frozen=True, slots=True)
class _Remote:
    prefill: PrefillOffer
    decode: DecodeOffer
    score: _Score


def choose_pair(
    nodes: Iterable[NodeEntry], need: Need, *, may_be_local: bool = True
) -> Pair | None:
    """may_be_local: also where there are prefill nodes.

    Raises ServingError when no node that is there could ever serve the request.
    """
    nodes = list(nodes)
    check_served(nodes, need)
    usable = [node for node in nodes if node.is_usable]
    decodes = [node for node in usable if not node.is_prefill]
    prefills = [node for node in usable if node.is_prefill and not node.is_refusing]
    if prefills and need.is_one_token:
        return _one_token(long_enough(prefills, need.max_num_tokens), need)
    decodes = long_enough(decodes, need.max_num_tokens)
    prefills = prefills and long_enough(prefills, need.num_prompt_tokens + 1)
    if need.num_choices > 1:
        decodes = large_enough(decodes, need)
    if prefills:
        decodes = with_a_match(decodes, prefills)
    roomy = [decode_offer(node, need) for node in decodes if has_room(node, need)]
    if not roomy:
        return None
    if not prefills:
        return _local(min(roomy, key=_local_score), "no prefill node")
    by_kind: dict[tuple[object, ...], list[PrefillOffer]] = {}
    for node in prefills:
        by_kind.setdefault(node.kv_kind, []).append(prefill_offer(node, need))
    remote = _best_remote(roomy, by_kind)
    if may_be_local:
        local = _best_local(roomy, by_kind, remote, need)
        if local is not None:
            return local
    if remote is None:
        return None
    return Pair(
        prefill=remote.prefill.node,
        decode=remote.decode.node,
        reason="paired",
        prefill_cached_tokens=remote.prefill.num_cached,
        decode_cached_tokens=remote.decode.num_cached,
    )


def _one_token(prefills: Iterable[NodeEntry], need: Need) -> Pair | None:
    offers = _open([prefill_offer(node, need) for node in prefills])

    def score(offer: PrefillOffer) -> tuple[float, int]:
        return offer.drawn_ms - SAVED_WEIGHT * offer.saved_ms, offer.node.last_turn

    best = min(offers, key=score, default=None)
    if best is None:
        return None
    return Pair(
        prefill=best.node,
        decode=None,
        reason="one token",
        prefill_cached_tokens=best.num_cached,
    )


def _open(offers: Iterable[PrefillOffer]) -> list[PrefillOffer]:
    """Those that may be taken now: of nodes that are free soon, and while there is one of them, of
    busier ones that have some of the prompt too. What is ahead there is waited for only if that is
    sooner than to compute anew, so it is less than what is saved."""
    offers = [offer for offer in offers if offer.node.num_outstanding < MAX_OUTSTANDING]
    if not any(_is_free_soon(offer) for offer in offers):
        return []
    return [offer for offer in offers if offer.num_cached or _is_free_soon(offer)]


def _is_free_soon(offer: PrefillOffer) -> bool:
    ahead_ms = offer.node.ahead_ms
    is_free = offer.node.num_outstanding == 0 or ahead_ms <= MAX_AHEAD_MS
    return is_free or offer.compute_ms <= SHORT_SHARE * ahead_ms


def _best_remote(decodes: Iterable[DecodeOffer], by_kind: _ByKind) -> _Remote | None:
    open_offers = {kind: _open(offers) for kind, offers in by_kind.items()}
    best: _Remote | None = None
    for decode in decodes:
        itl_cost_ms = ITL_WEIGHT * decode.itl_ms
        for prefill in open_offers[decode.node.kv_kind]:
            cost_ms = itl_cost_ms - SAVED_WEIGHT * prefill.saved_ms
            if best is not None and cost_ms + prefill.drawn_ms > best.score[0]:
                continue
            ms = cost_ms + prefill.first_token_ms(num_cached_there=decode.num_cached)
            score = (ms, *_between_equals(decode.node), prefill.node.last_turn)
            if best is None or score < best.score:
                best = _Remote(prefill, decode, score)
    return best


def _best_local(
    decodes: Iterable[DecodeOffer], by_kind: _ByKind, remote: _Remote | None, need: Need
) -> Pair | None:
    """A decode node that does better without the remote pair, if there is one."""
    best: tuple[_Score, DecodeOffer, str] | None = None
    for decode in decodes:
        reason = _why_local(decode, by_kind[decode.node.kv_kind], remote, need)
        score = _local_score(decode)
        if reason and (best is None or score < best[0]):
            best = score, decode, reason
    return _local(best[1], best[2]) if best else None


def _why_local(
    decode: DecodeOffer, prefills: Iterable[PrefillOffer], remote: _Remote | None, need: Need
) -> str:
    """The reason to prefill on this node; empty if there is none."""
    if decode.is_short and decode.num_cached >= MOST_OF_IT * need.num_prompt_tokens:
        # Also if the pair would be better by less than a step: the prefill node's time is others'.
        is_worth_it = remote is None or _gain_ms(decode, remote, need) > -decode.node.step_budget_ms
        return "prefix cached" if is_worth_it else ""
    if remote is not None:
        is_busy = remote.prefill.node.ahead_ms > 0
        is_sooner = is_busy and decode.is_short and _gain_ms(decode, remote, need) > 0
        return "short prompt, prefill busy" if is_sooner else ""
    there = decode.num_cached
    if all(decode.local_ms < offer.first_token_ms(num_cached_there=there) for offer in prefills):
        return "prefill saturated"
    return ""


def _gain_ms(decode: DecodeOffer, remote: _Remote, need: Need) -> float:
    """By which this node alone is better than the pair. What its cache saves is counted as the
    prefill node would compute it: it is most of the prompt, and measured profiles of two equal
    nodes differ by some percent."""
    prefill = remote.prefill
    saved_ms = (prefill.compute_ms + prefill.saved_ms) * decode.num_cached / need.num_prompt_tokens
    alone_ms = decode.local_ms + ITL_WEIGHT * decode.itl_ms - SAVED_WEIGHT * saved_ms
    return remote.score[0] - alone_ms


def _local(decode: DecodeOffer, reason: str) -> Pair:
    return Pair(
        prefill=None, decode=decode.node, reason=reason, decode_cached_tokens=decode.num_cached
    )


def _local_score(decode: DecodeOffer) -> _Score:
    cost_ms = ITL_WEIGHT * decode.itl_ms - SAVED_WEIGHT * decode.saved_ms
    return decode.local_ms + cost_ms, *_between_equals(decode.node), 0


def _between_equals(node: NodeEntry) -> tuple[int, int]:
    """Most blocks, then whose turn it is."""
    return node.held_blocks - node.available_blocks, node.last_turn
