"""A batch of attention rows with its answer in float64: what tests and bench/gpu_check.py share.

    case = make_case([(1, 15), (40, 0)], ...)     rows of (queries, keys before them)
    case.expected(window=...)                      the formula of kernels/paged_attention.py

Slots that no row has written are NaN, so that reading one shows. Block tables are shuffled.
Suffixes: T packed tokens, N query heads, H kv heads, G query heads per kv head, C keys, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.packed_rows import AttentionRow, PackedRows, pack_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Keys and values are in the pool, at layer 1 of 2 where layers is 2."""

    q_TND: torch.Tensor
    pool: torch.Tensor
    layer: int
    rows: tuple[AttentionRow, ...]

    def packed(self) -> PackedRows:
        return pack_rows(self.rows, block_size=self.pool.shape[4], device=self.pool.device)

    def expected(
        self,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """out_TND in float64, computed row by row."""
        out_TND = torch.zeros_like(self.q_TND, dtype=torch.float64)
        for row in self.rows:
            tokens = slice(row.first_token, row.first_token + row.num_tokens)
            k_CHD, v_CHD = self._keys(row)
            if row.num_tokens:
                out_TND[tokens] = _attention(
                    self.q_TND[tokens].double(), k_CHD, v_CHD, window, soft_cap, sinks_N
                )
        return out_TND

    def _keys(self, row: AttentionRow) -> tuple[torch.Tensor, torch.Tensor]:
        position_C = torch.arange(row.context_len, device=self.pool.device)
        block_size = self.pool.shape[4]
        table = torch.tensor(row.block_table, dtype=torch.int64, device=self.pool.device)
        block_C, slot_C = table[position_C // block_size], position_C % block_size
        k_pool, v_pool = self.pool[:, self.layer].unbind(1)
        return k_pool[block_C, :, slot_C].double(), v_pool[block_C, :, slot_C].double()


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layers: int = 2,
) -> AttentionCase:
    """rows are (queries, keys before them); heads are (query heads, kv heads)."""
    generator = torch.Generator(device=device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    num_query_heads, num_kv_heads = heads
    lengths = [-(-(queries + before) // block_size) for queries, before in rows]
    order = torch.randperm(sum(lengths) + 3, generator=torch.Generator().manual_seed(0)).tolist()
    shape = (len(order), layers, 2, num_kv_heads, block_size, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
    layer, first_token, cases = layers - 1, 0, []
    for (queries, before), num_blocks in zip(rows, lengths, strict=True):
        table = [order.pop() for _ in range(num_blocks)]
        context = queries + before
        kv = randn(num_blocks, 2, num_kv_heads, block_size, head_dim)
        if num_blocks:
            kv[-1, :, :, context - (num_blocks - 1) * block_size :] = float("nan")
            pool[torch.tensor(table, device=device), layer] = kv
        cases.append(
            AttentionRow(
                first_token=first_token, num_tokens=queries, context_len=context, block_table=table
            )
        )
        first_token += queries
    return AttentionCase(
        q_TND=randn(first_token, num_query_heads, head_dim),
        pool=pool,
        layer=layer,
        rows=tuple(cases),
    )


def _attention(
    q_TND: torch.Tensor,
    k_CHD: torch.Tensor,
    v_CHD: torch.Tensor,
    window: int | None,
    soft_cap: float | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    """One row's queries, at the end of its keys; everything in float64."""
    num_tokens, num_heads, head_dim = q_TND.shape
    num_keys, num_kv_heads, _ = k_CHD.shape
    group_size = num_heads // num_kv_heads
    k_NCD = k_CHD.repeat_interleave(group_size, dim=1).transpose(0, 1)
    v_NCD = v_CHD.repeat_interleave(group_size, dim=1).transpose(0, 1)
    score_NTC = q_TND.transpose(0, 1) @ k_NCD.mT * head_dim**-0.5
    if soft_cap is not None:
        score_NTC = soft_cap * torch.tanh(score_NTC / soft_cap)
    key_C = torch.arange(num_keys, device=q_TND.device)
    position_T1 = torch.arange(num_keys - num_tokens, num_keys, device=q_TND.device)[:, None]
    sees_TC = key_C <= position_T1
    if window is not None:
        sees_TC &= key_C > position_T1 - window
    weight_NTC = torch.where(sees_TC, score_NTC, float("-inf")).exp()
    total_NT1 = weight_NTC.sum(-1, keepdim=True)
    if sinks_N is not None:
        total_NT1 += sinks_N.double().exp()[:, None, None]
    return ((weight_NTC / total_NT1) @ v_NCD).transpose(0, 1)
