"""The C++ ops on torch tensors, one native call each, with the padding that they ask for.

Suffixes: T rows, I in features, O out features, N query heads, H kv heads, G their ratio, D head
dim.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu.arena import Arena
from kernels.cpu.build import BuildFailed
from kernels.cpu.library import (
    ISAS,
    MAX_TILE_ROWS,
    CAttentionOptions,
    CPool,
    Runner,
    load_library,
    supported_isas,
)
from kernels.cpu.packed_linear import PackedLinear, interleave_gate_up, padded
from kernels.paged_attention import AttentionRow

STORE, ADD, SILU_MUL = range(3)

every_isa = pytest.mark.parametrize("isa", ISAS)


def make_runner(isa: str | None = None, *, num_threads: int = 1) -> Runner:
    """A runner, or a skipped test where this machine cannot have it."""
    try:
        library = load_library()
    except BuildFailed as error:
        pytest.skip(str(error))
    if isa is not None and isa not in supported_isas(library):
        pytest.skip(f"no {isa} here")
    return Runner(library, num_threads=num_threads, isa=isa)


def linear(
    runner: Runner,
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    kind: int = STORE,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_TO. For SILU_MUL the weight is gate, then up."""
    num_rows, num_out = x_TI.shape[0], weight_OI.shape[0]
    if kind == SILU_MUL:
        num_out //= 2
        weight_OI = interleave_gate_up(weight_OI)
        bias_O = None if bias_O is None else interleave_gate_up(bias_O)
    packed = PackedLinear(weight_OI, bias_O, arena=Arena())
    x = _padded_rows(x_TI)
    out = torch.zeros(num_rows, padded(num_out), dtype=torch.bfloat16)
    if residual_TO is not None:
        out[:, :num_out] = residual_TO
    runner.library.disagg_linear(
        runner.handle, packed.c_struct, kind, x.data_ptr(), num_rows, out.data_ptr()
    )
    assert not out[:, num_out:].any(), "padding must stay zero"
    return out[:, :num_out]


def attention(
    runner: Runner,
    q_TND: torch.Tensor,
    *,
    pool: torch.Tensor,
    layer: int,
    rows: Sequence[AttentionRow],
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """out_TND of rows that lie end to end in q."""
    num_tokens, num_heads, head_dim = q_TND.shape
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    head_dim_p = padded(head_dim)
    q_HTGD = F.pad(q_TND, (0, head_dim_p - head_dim, 0, 0, 0, MAX_TILE_ROWS))
    q_HTGD = q_HTGD.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim_p)
    q_HTGD = q_HTGD.transpose(0, 1).contiguous()
    out = torch.full((num_tokens, num_heads, head_dim_p), float("nan"), dtype=torch.bfloat16)
    numbers: list[int] = []
    tables: list[int] = []
    for row in rows:
        num_row_blocks = -(-row.context_len // block_size)
        numbers += (row.num_tokens, row.context_len, len(tables), 0)
        tables += row.block_table[:num_row_blocks]
    c_rows, c_tables = (torch.tensor(values, dtype=torch.int32) for values in (numbers, tables))
    error = runner.library.disagg_attention(
        runner.handle,
        CPool(pool.data_ptr(), num_blocks, num_layers, num_kv_heads, block_size, head_dim),
        layer,
        c_rows.data_ptr(),
        len(rows),
        c_tables.data_ptr(),
        q_HTGD.data_ptr(),
        q_HTGD.shape[1],
        num_heads // num_kv_heads,
        CAttentionOptions(
            scale=head_dim**-0.5,
            window=window,
            soft_cap=soft_cap,
            sinks=None if sinks_N is None else sinks_N.data_ptr(),
        ),
        out.data_ptr(),
    )
    assert error == 0
    assert not out[:, :, head_dim:].nan_to_num(0).any(), "padding must be zero"
    return out[:, :, :head_dim]


def rms_norm(
    runner: Runner, x_TI: torch.Tensor, weight_I: torch.Tensor, *, eps: float
) -> torch.Tensor:
    size = x_TI.shape[1]
    x = F.pad(x_TI, (0, padded(size) - size))
    weight = F.pad(weight_I, (0, padded(size) - size))
    out = torch.empty_like(x)
    runner.library.disagg_rms_norm(
        runner.handle,
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        len(x),
        size,
        padded(size),
        eps,
    )
    return out[:, :size]


def rotate(
    runner: Runner, x_D: torch.Tensor, cos_F: torch.Tensor, sin_F: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(x_D)
    pointers = (tensor.data_ptr() for tensor in (x_D, cos_F, sin_F, out))
    runner.library.disagg_rotate(runner.handle, *pointers, len(cos_F))
    return out


def argmax(runner: Runner, logits_V: torch.Tensor) -> int:
    best: int = runner.library.disagg_argmax(runner.handle, logits_V.data_ptr(), len(logits_V))
    return best


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def _padded_rows(x_TI: torch.Tensor) -> torch.Tensor:
    """In features to a multiple of 32 with zeros; the rows beyond may hold anything."""
    x = F.pad(x_TI, (0, padded(x_TI.shape[1]) - x_TI.shape[1]))
    return torch.cat((x, torch.full((MAX_TILE_ROWS, x.shape[1]), float("nan")).to(x)))
