"""A step's rows, packed: one long list of tokens, and where each one's KV goes.

    StepPlan --pack--> Batch --Decoder.forward--> logits of the rows that draw, then of the tokens
                                                 that are scored

Suffixes: T packed tokens, B rows that draw and tokens that are scored.
"""

from dataclasses import dataclass

import torch

from engine.executor import Draw, StepPlan
from kernels.packed_rows import AttentionRow, PackedRows
from kernels.paged_attention import AttentionPlan, plan_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Token t is token_ids_T[t], at positions_T[t] of its sequence, its KV at (block_T, slot_T).

    last_B names the packed tokens whose logits are wanted, draws says how each is drawn from:
    first those that are, in the order of rows, then, with None, those that are only scored.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    block_T: torch.Tensor
    slot_T: torch.Tensor
    attention: AttentionPlan | PackedRows
    last_B: torch.Tensor
    draws: tuple[Draw | None, ...]


def pack(plan: StepPlan, *, pool: torch.Tensor) -> Batch:
    """The rows of a plan over a pool. Raises ValueError for a row that its blocks do not cover."""
    block_size = pool.shape[4]
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    rows: list[AttentionRow] = []
    last: list[int] = []
    draws: list[Draw] = []
    scored: list[int] = []
    for index, row in enumerate(plan.rows):
        end = row.start + len(row.token_ids)
        if not row.token_ids or len(row.block_table) * block_size < end:
            raise ValueError(
                f"row {index}: {len(row.token_ids)} tokens at {row.start} do not fit "
                f"{len(row.block_table)} blocks of {block_size}"
            )
        rows.append(
            AttentionRow(
                first_token=len(token_ids),
                num_tokens=len(row.token_ids),
                context_len=end,
                block_table=row.block_table,
            )
        )
        if row.scoring is not None:
            scored.extend(range(len(token_ids), len(token_ids) + len(row.scoring.token_ids)))
        token_ids.extend(row.token_ids)
        positions.extend(range(row.start, end))
        blocks.extend(row.block_table[position // block_size] for position in range(row.start, end))
        if row.draw is not None:
            last.append(len(token_ids) - 1)
            draws.append(row.draw)
    positions_T = torch.tensor(positions, dtype=torch.int64, device=pool.device)
    return Batch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=pool.device),
        positions_T=positions_T,
        block_T=torch.tensor(blocks, dtype=torch.int64, device=pool.device),
        slot_T=positions_T % block_size,
        attention=plan_attention(rows, pool=pool),
        last_B=torch.tensor(last + scored, dtype=torch.int64, device=pool.device),
        draws=(*draws, *(None for _ in scored)),
    )
