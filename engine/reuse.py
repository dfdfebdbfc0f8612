"""What a request may reuse of earlier ones, and under which hashes its own blocks are kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sequence import GenerationSpec
from kvtransfer.layout import KvLayout
from kvtransfer.prefix import PrefixChain, prompt_chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """chain is of the tokens that are there at the start; None: nothing is kept of them. prefix
    are the hashes to look up."""

    chain: PrefixChain | None
    prefix: Sequence[bytes]


def reuse_of(spec: GenerationSpec, layout: KvLayout, *, is_on: bool) -> Reuse:
    """Prompt log-probabilities need the whole forward pass: nothing is looked up for them."""
    if not is_on:
        return Reuse(chain=None, prefix=())
    chain = prompt_chain(spec.token_ids, layout, salt=spec.cache_salt)
    is_scored = spec.num_prompt_logprobs is not None
    return Reuse(chain=chain, prefix=() if is_scored else tuple(chain.hashes))
