"""Draws turned into tensors, and tokens drawn on the device: the step's one wait is for their ids.

    draws --Staging--> temperature, top_k, ... on the device --kernels/sample.py--> ids --> host

Which rows are greedy, and which have a bias or penalties, is known on the host: nobody sorts a
vocabulary for the former, or counts tokens for any but the latter.
Runs on the engine thread. Suffixes: B rows, P rows with penalties, T tokens before, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.executor import Draw, History
from engine.sampler import uniform
from engine.staging import Array, Staging
from kernels.sample import greedy, penalize, sample


class DeviceSampler:
    """Owner of the buffers on both sides. Draws what engine.sampler.draw_tokens draws."""

    def __init__(self, device: torch.device) -> None:
        self._staging = Staging(device, size_bytes=1 << 16)
        self._penalties = Staging(device, size_bytes=16)
        self._is_cuda = device.type == "cuda"
        self._ids_B = torch.zeros(0, dtype=torch.int64)

    def draw(self, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """One token id per row; overwrites logits. Waits for the device.

        Raises ValueError for a row whose logits hold a NaN, or nothing that may be drawn.
        """
        adjusted = [row for row, draw in enumerate(draws) if draw.is_adjusted]
        if adjusted:
            logits_BV = self._adjust(logits_BV.float(), draws, adjusted)
        sampled = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
        views = self._upload(draws, sampled)
        banned_row, banned_id, row_B, *params = views
        if banned_row.shape[0]:
            logits_BV[banned_row.long(), banned_id.long()] = float("-inf")
        token_B = greedy(logits_BV)
        if sampled:
            temperature_B, top_k_B, tail_B, min_p_B, u_B = params
            token_B[row_B.long()] = sample(
                logits_BV[row_B.long()],
                temperature_B=temperature_B,
                top_k_B=top_k_B,
                tail_B=tail_B,
                min_p_B=min_p_B,
                u_B=u_B,
            )
        tokens = self._fetch(token_B)
        if -1 in tokens:
            raise ValueError(f"logits of row {tokens.index(-1)}: no finite maximum")
        return tokens

    def _adjust(
        self, logits_BV: torch.Tensor, draws: Sequence[Draw], adjusted: Sequence[int]
    ) -> torch.Tensor:
        """Bias and penalties, as engine.sampler.penalize."""
        arrays = _adjustments(draws, adjusted)
        self._penalties.reserve(arrays)
        views = self._penalties.upload(arrays)
        row_A, bias_row, bias_id, bias, row_P, repetition_P, presence_P, frequency_P, *rest = views
        logits_BV.index_put_((bias_row.long(), bias_id.long()), bias, accumulate=True)
        if row_P.shape[0]:
            row_T, token_T, is_output_T = rest
            logits_BV[row_P.long()] = penalize(
                logits_BV[row_P.long()],
                repetition_B=repetition_P,
                presence_B=presence_P,
                frequency_B=frequency_P,
                row_T=row_T.long(),
                token_T=token_T.long(),
                is_output_T=is_output_T,
            )
        highest = torch.finfo(torch.float32).max
        logits_BV[row_A.long()] = logits_BV[row_A.long()].clamp(max=highest)
        return logits_BV

    def _upload(self, draws: Sequence[Draw], sampled: Sequence[int]) -> list[torch.Tensor]:
        banned = [(row, token) for row, draw in enumerate(draws) for token in draw.banned_token_ids]
        params = [draws[row].sampling for row in sampled]
        u = [
            uniform(seed=draw.seed, choice=draw.choice, position=draw.position)
            for draw in (draws[row] for row in sampled)
        ]
        arrays: list[Array] = [
            np.array([row for row, _ in banned], dtype=np.int32),
            np.array([token for _, token in banned], dtype=np.int32),
            np.array(sampled, dtype=np.int32),
            np.array([param.temperature for param in params], dtype=np.float32),
            np.array([param.top_k for param in params], dtype=np.int32),
            np.array([1 - param.top_p for param in params], dtype=np.float32),
            np.array([param.min_p for param in params], dtype=np.float32),
            np.array(u, dtype=np.float64),
        ]
        self._staging.reserve(arrays)
        return self._staging.upload(arrays)

    def _fetch(self, token_B: torch.Tensor) -> list[int]:
        num_rows = token_B.shape[0]
        if self._ids_B.shape[0] < num_rows:
            self._ids_B = torch.zeros(2 * num_rows, dtype=torch.int64, pin_memory=self._is_cuda)
        ids_B = self._ids_B[:num_rows]
        ids_B.copy_(token_B, non_blocking=True)
        if self._is_cuda:
            torch.cuda.current_stream(token_B.device).synchronize()
        tokens: list[int] = ids_B.tolist()
        return tokens


def _adjustments(draws: Sequence[Draw], adjusted: Sequence[int]) -> list[Array]:
    """The rows, their biases, and of those with a history the penalties and tokens before."""
    biased = [(row, *entry) for row in adjusted for entry in draws[row].sampling.logit_bias]
    penalized = [row for row in adjusted if draws[row].history is not None]
    params = [draws[row].sampling for row in penalized]
    histories = [history for row in penalized if (history := draws[row].history) is not None]
    return [
        np.array(adjusted, dtype=np.int32),
        np.array([row for row, _, _ in biased], dtype=np.int32),
        np.array([token for _, token, _ in biased], dtype=np.int32),
        np.array([bias for _, _, bias in biased], dtype=np.float32),
        np.array(penalized, dtype=np.int32),
        np.array([param.repetition_penalty for param in params], dtype=np.float32),
        np.array([param.presence_penalty for param in params], dtype=np.float32),
        np.array([param.frequency_penalty for param in params], dtype=np.float32),
        *_tokens_before(histories),
    ]


def _tokens_before(histories: Sequence[History]) -> list[Array]:
    """row_T, counted among these histories, token_T and is_output_T."""
    token_ids = [np.array(history.token_ids, dtype=np.int32) for history in histories]
    row_T = [np.full(len(ids), row, np.int32) for row, ids in enumerate(token_ids)]
    is_output_T = [
        (np.arange(len(ids)) >= history.num_prompt_tokens).astype(np.float32)
        for history, ids in zip(histories, token_ids, strict=True)
    ]
    empty = np.zeros(0, np.int32)
    return [
        np.concatenate([empty, *row_T]),
        np.concatenate([empty, *token_ids]),
        np.concatenate([empty.astype(np.float32), *is_output_T]),
    ]
