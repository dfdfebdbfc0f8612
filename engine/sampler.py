"""Drawing tokens: a pure function of logits, params and (seed, choice, position).

    logits -> + logit_bias -> repetition, presence, frequency penalty -> banned to -inf
        -> greedy: argmax
        -> else: / temperature -> top_k -> top_p -> min_p -> inverse CDF at u

u is one number in [0, 1) hashed from (seed, choice, position): the same request draws the same
tokens on any node, in any batch, and after a resume. Filters have transformers' order and meaning;
so has the repetition penalty, on each token of prompt and output: positive logits are divided by
it, others multiplied. Presence (once) and frequency (per occurrence) are subtracted for tokens of
the output alone, as OpenAI's API and vLLM do.

Suffixes: B rows, V vocabulary, K tokens that pass the filters, in id order.
"""

import hashlib
from collections.abc import Sequence

import torch

from engine.executor import Draw
from engine.sequence import SamplingParams


def draw_tokens(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row. Equal logits give the lowest id when greedy.

    Raises ValueError for a row whose logits hold a NaN, or nothing that may be drawn.
    """
    logits_BV = _adjust(logits_BV.float(), draws)
    best_B, token_B = logits_BV.max(dim=-1)
    is_bad_B = ~torch.isfinite(best_B)
    if is_bad_B.any():
        raise ValueError(f"logits of row {int(is_bad_B.nonzero()[0])}: no finite maximum")
    tokens: list[int] = token_B.tolist()
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            ids_K, cdf_K, target = _distribution(logits_BV[row], draw)
            tokens[row] = int(ids_K[_index(cdf_K, target)])
    return tokens


def penalize(logits_V: torch.Tensor, draw: Draw) -> torch.Tensor:
    """float32 logits with what draw's bias and penalties make of them, in a new tensor.

    None becomes +inf, however small the repetition penalty. Source: transformers'
    SequenceBiasLogitsProcessor and RepetitionPenaltyLogitsProcessor, vLLM's apply_penalties.
    """
    sampling, history, logits_V = draw.sampling, draw.history, logits_V.clone()
    for token_id, bias in sampling.logit_bias:
        logits_V[token_id] += bias
    if history is not None:
        counts_V = _count(history.token_ids, like_V=logits_V)
        repetition = torch.tensor(sampling.repetition_penalty, device=logits_V.device)
        repeated_V = torch.where(logits_V < 0, logits_V * repetition, logits_V / repetition)
        logits_V = torch.where(counts_V > 0, repeated_V, logits_V)
        counts_V = _count(history.token_ids[history.num_prompt_tokens :], like_V=logits_V)
        logits_V -= (counts_V > 0) * sampling.presence_penalty
        logits_V -= counts_V * sampling.frequency_penalty
    return logits_V.clamp(max=torch.finfo(torch.float32).max)


def filter_logits(logits_V: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Logits over temperature, with -inf for what top_k, top_p and min_p take out; float32.

    The maximum is subtracted first: probabilities do not change, and no temperature, however
    small, overflows. Source: transformers' TemperatureLogitsWarper, TopK-, TopP- and MinP-.
    """
    scores_V = logits_V.float()
    scores_V = (scores_V - scores_V.max()) / sampling.temperature
    num_tokens = scores_V.shape[-1]
    if 0 < sampling.top_k < num_tokens:
        kth = scores_V.topk(sampling.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < kth, float("-inf"))
    if sampling.top_p < 1.0:
        ascending_V, order_V = scores_V.sort(stable=True)
        is_out_V = ascending_V.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        is_out_V[-1] = False
        scores_V = scores_V.masked_fill(is_out_V.scatter(0, order_V, is_out_V), float("-inf"))
    if sampling.min_p > 0.0:
        probs_V = scores_V.softmax(dim=-1)
        scores_V = scores_V.masked_fill(probs_V < sampling.min_p * probs_V.max(), float("-inf"))
    return scores_V


def uniform(*, seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same wherever it is computed."""
    text = f"{seed}:{choice}:{position}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def sampling_margin(logits_V: torch.Tensor, draw: Draw) -> float:
    """How far the draw is from another token, for judging where two runs first differ.

    Greedy: the gap between the two highest logits. Otherwise: the distance, in probability, of u
    to the nearer edge of the drawn token's share that has a neighbour (infinite if none has).
    """
    logits_V = _adjust(logits_V.float()[None], [draw])[0]
    if draw.sampling.temperature <= 0:
        if logits_V.shape[-1] == 1:
            return float("inf")
        first, second = logits_V.topk(2).values.tolist()
        return float(first - second)
    _, cdf_K, target = _distribution(logits_V, draw)
    index = _index(cdf_K, target)
    edges = [float(cdf_K[edge]) for edge in (index - 1, index) if 0 <= edge < len(cdf_K) - 1]
    return min((abs(target - edge) for edge in edges), default=float("inf")) / float(cdf_K[-1])


def _distribution(logits_V: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(ids_K, cdf_K, u scaled to the CDF's end); float64, over tokens of probability above 0."""
    probs_V = filter_logits(logits_V, draw.sampling).softmax(dim=-1)
    ids_K = probs_V.nonzero().flatten()
    cdf_K = probs_V[ids_K].double().cumsum(dim=0)
    u = uniform(seed=draw.seed, choice=draw.choice, position=draw.position)
    return ids_K, cdf_K, u * float(cdf_K[-1])


def _index(cdf_K: torch.Tensor, target: float) -> int:
    """The first entry above target; the last one if rounding put target at the end."""
    return min(int(torch.searchsorted(cdf_K, target, right=True)), len(cdf_K) - 1)


def _count(token_ids: Sequence[int], *, like_V: torch.Tensor) -> torch.Tensor:
    """counts_V, int64: how often each token is among these."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=like_V.device)
    return torch.bincount(ids, minlength=like_V.shape[-1])


def _adjust(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    rows = [row for row, draw in enumerate(draws) if draw.banned_token_ids or draw.is_adjusted]
    if not rows:
        return logits_BV
    logits_BV = logits_BV.clone()
    for row in rows:
        draw = draws[row]
        if draw.is_adjusted:
            logits_BV[row] = penalize(logits_BV[row], draw)
        if draw.banned_token_ids:
            logits_BV[row, list(draw.banned_token_ids)] = float("-inf")
    return logits_BV
