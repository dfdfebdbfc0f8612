"""Log-probabilities of tokens, and of the likeliest ones beside them.

    logits as the model gave them --float32 log-softmax--> of the token, of the top K

Runs on the engine thread, on the device of the logits, and waits for it. Equal ones are ordered
by id, which topk alone does not promise; bfloat16 logits are often equal.
Suffixes: B positions, V vocabulary, K alternatives, C candidates for them.
"""

from collections.abc import Sequence

import torch

from engine.executor import TokenLogprobs

# Of B times V at a time, a few times over in float32, on a device whose memory is mostly KV.
_MAX_ELEMENTS = 1 << 24


def token_logprobs(
    logits_BV: torch.Tensor, token_ids: Sequence[int], *, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Of token_ids[b] under row b, with num_top[b] alternatives, or as many as there are.

    Raises ValueError for logits that hold a NaN.
    """
    step = max(1, _MAX_ELEMENTS // logits_BV.shape[-1])
    result: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), step):
        part = slice(first, first + step)
        result += _part(logits_BV[part], token_ids[part], num_top=num_top[part])
    return result


def _part(
    logits_BV: torch.Tensor, token_ids: Sequence[int], *, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    logprobs_BV = logits_BV.float().log_softmax(dim=-1)
    # One NaN makes a row of them.
    if logprobs_BV[:, 0].isnan().any():
        raise ValueError("logits hold a NaN: no log-probabilities")
    token_B1 = torch.tensor(token_ids, device=logits_BV.device)[:, None]
    top_BK = _top(logprobs_BV, min(max(num_top), logits_BV.shape[-1]))
    wanted = torch.cat((token_B1, top_BK), dim=1)
    # Ids are exact in float64, so that one copy brings everything to the host.
    numbers = torch.cat((logprobs_BV.gather(1, wanted).double(), top_BK.double()), dim=1).tolist()
    num_alternatives = top_BK.shape[1]
    result = []
    for (chosen, *rest), count in zip(numbers, num_top, strict=True):
        logprobs, ids = rest[:num_alternatives], rest[num_alternatives:]
        top = tuple((int(token), value) for token, value in zip(ids, logprobs, strict=True))
        result.append(TokenLogprobs(chosen=chosen, top=top[:count]))
    return result


def _top(logprobs_BV: torch.Tensor, count: int) -> torch.Tensor:
    """ids_BK of the highest, in order: by value, then the lowest id."""
    if count == 0:
        return torch.empty(len(logprobs_BV), 0, dtype=torch.int64, device=logprobs_BV.device)
    # topk picks any of those that are equal to the last one, so that they all compete: C of them.
    last_B1 = logprobs_BV.topk(count, dim=-1).values[:, -1:]
    row_C, id_C = (logprobs_BV >= last_B1).nonzero(as_tuple=True)
    order_C = logprobs_BV[row_C, id_C].sort(descending=True, stable=True).indices
    order_C = order_C[row_C[order_C].sort(stable=True).indices]
    num_B = torch.bincount(row_C, minlength=len(logprobs_BV))
    first_B1 = (num_B.cumsum(0) - num_B)[:, None]
    ranks_K = torch.arange(count, device=logprobs_BV.device)
    return id_C[order_C[first_B1 + ranks_K]]
