"""Tokens drawn from a batch of logits on the device, without waiting for it.

    penalize  logits after a repetition, presence and frequency penalty
    greedy    argmax, the lowest id of equal ones; -1 where there is no finite maximum
    sample    p = softmax over what temperature, top_k, top_p and min_p leave;
              token = first id with cumsum(p) > u * sum(p), in id order, in float64

torch is enough here, on both devices: greedy is one reduction that runs at copy bandwidth, and a
sampled row is a sort and four scans of its logits. A kernel of ours would save some passes of a
few hundred microseconds, only for rows that sample, and would have to break ties as sort does.

engine/sampler.py draws one row at a time and is the reference: same filters, same order.
Suffixes: B rows, V vocabulary, T tokens that came before, of all rows.
"""

import torch


def penalize(
    logits_BV: torch.Tensor,
    *,
    repetition_B: torch.Tensor,
    presence_B: torch.Tensor,
    frequency_B: torch.Tensor,
    row_T: torch.Tensor,
    token_T: torch.Tensor,
    is_output_T: torch.Tensor,
) -> torch.Tensor:
    """float32 logits, new ones. Token t came before in row row_T[t]; int64.

    Penalties are float32; is_output_T is 1.0 for a token of the output and 0.0 for the prompt's.
    """
    at_T = row_T * logits_BV.shape[-1] + token_T
    is_seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    is_seen_BV.view(-1)[at_T] = True
    repeated_BV = torch.where(
        logits_BV < 0, logits_BV * repetition_B[:, None], logits_BV / repetition_B[:, None]
    )
    logits_BV = torch.where(is_seen_BV, repeated_BV, logits_BV)
    # Sums of ones: exact in any order.
    count_BV = torch.zeros_like(logits_BV)
    count_BV.view(-1).scatter_add_(0, at_T, is_output_T)
    logits_BV = logits_BV - (count_BV > 0) * presence_B[:, None]
    return logits_BV - count_BV * frequency_B[:, None]


def greedy(logits_BV: torch.Tensor) -> torch.Tensor:
    """token_B, int64."""
    best_B, token_B = logits_BV.max(dim=-1)
    return torch.where(torch.isfinite(best_B), token_B, -1)


def sample(
    logits_BV: torch.Tensor,
    *,
    temperature_B: torch.Tensor,
    top_k_B: torch.Tensor,
    tail_B: torch.Tensor,
    min_p_B: torch.Tensor,
    u_B: torch.Tensor,
) -> torch.Tensor:
    """token_B, int64, or -1 where no logit is a finite maximum.

    temperature_B above 0, tail_B (1 - top_p) and min_p_B are float32, u_B in [0, 1) float64.
    top_k_B 0 keeps all.
    """
    num_tokens = logits_BV.shape[-1]
    logits_BV = logits_BV.float()
    best_B1 = logits_BV.max(dim=-1, keepdim=True).values
    scores_BV = (logits_BV - best_B1) / temperature_B[:, None]
    ascending_BV, order_BV = scores_BV.sort(dim=-1, stable=True)
    top_k_B = torch.where(top_k_B > 0, top_k_B.clamp(max=num_tokens), num_tokens)
    kth_B1 = ascending_BV.gather(1, (num_tokens - top_k_B)[:, None].long())
    ascending_BV = ascending_BV.masked_fill(ascending_BV < kth_B1, float("-inf"))
    is_out_BV = ascending_BV.softmax(dim=-1).cumsum(dim=-1) <= tail_B[:, None]
    is_out_BV &= (tail_B > 0)[:, None]
    is_out_BV[:, -1] = False
    ascending_BV = ascending_BV.masked_fill(is_out_BV, float("-inf"))
    scores_BV = torch.empty_like(scores_BV).scatter_(1, order_BV, ascending_BV)
    probs_BV = scores_BV.softmax(dim=-1)
    is_out_BV = probs_BV < min_p_B[:, None] * probs_BV.max(dim=-1, keepdim=True).values
    probs_BV = scores_BV.masked_fill(is_out_BV, float("-inf")).softmax(dim=-1)
    cdf_BV = probs_BV.double().cumsum(dim=-1)
    total_B1 = cdf_BV[:, -1:]
    token_B1 = torch.searchsorted(cdf_BV, u_B[:, None] * total_B1, right=True)
    # Where rounding put the target at the end: the last token with a probability.
    last_B1 = torch.searchsorted(cdf_BV, total_B1.contiguous())
    token_B = torch.minimum(token_B1, last_B1)[:, 0]
    return torch.where(torch.isfinite(best_B1[:, 0]), token_B, -1)
