"""Draws turned into tensors, and tokens drawn on the device: the step's one wait is for their ids.

    draws --Staging--> temperature, top_k, ... on the device --kernels/sample.py--> ids --> host

Which rows are greedy is known on the host, so that nobody sorts a vocabulary for them.
Runs on the engine thread. Suffixes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.executor import Draw
from engine.sampler import uniform
from engine.staging import Array, Staging
from kernels.sample import greedy, sample


class DeviceSampler:
    """Owner of the buffers on both sides. Draws what engine.sampler.draw_tokens draws."""

    def __init__(self, device: torch.device) -> None:
        self._staging = Staging(device, size_bytes=1 << 16)
        self._is_cuda = device.type == "cuda"
        self._ids_B = torch.zeros(0, dtype=torch.int64)

    def draw(self, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """One token id per row; overwrites banned logits. Waits for the device.

        Raises ValueError for a row whose logits hold a NaN, or nothing that may be drawn.
        """
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
