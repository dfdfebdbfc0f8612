"""gpu_check's kernels against float64, at odd sizes.

Public functions of kernels/ are called, so that what is checked is what a model gets. Suffixes:
T packed tokens, E hidden dim, F inner dim, D head dim, B rows, V vocabulary.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.attention_case import make_case
from bench.gpu_report import Report
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_and_cache_write import rope_and_cache_write
from kernels.sample import sample
from kernels.silu_and_mul import silu_and_mul

BLOCK_SIZE = 16


def check_kernels(report: Report, device: torch.device) -> None:
    """Each op in float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        with report.check("elementwise", str(dtype)):
            _elementwise_errors(report, device, dtype)
        _attention_errors(report, device, dtype)
    with report.check("sample", "draws"):
        _sample_error(report, device)


def _elementwise_errors(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    randn = partial(randn_on, device=device, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    x_TE, r_TE, w_E = randn(123, 1000), randn(123, 1000), randn(1000)
    exact = partial(F.rms_norm, normalized_shape=(1000,), weight=w_E.double(), eps=1e-5)
    report.error(
        "rms_norm", f"123 x 1000 {name}", rms_norm(x_TE, w_E, eps=1e-5), exact(x_TE.double())
    )
    normed_TE, total_TE = add_rms_norm(x_TE, r_TE, w_E, eps=1e-5)
    report.error("add_rms_norm", f"sum {name}", total_TE, x_TE.double() + r_TE.double())
    report.error("add_rms_norm", f"norm {name}", normed_TE, exact(x_TE.double() + r_TE.double()))
    gate_TF, up_TF = x_TE.chunk(2, dim=-1)
    report.error(
        "silu_and_mul",
        f"123 x 500 {name}",
        silu_and_mul(x_TE),
        F.silu(gate_TF.double()) * up_TF.double(),
    )
    _rope_errors(report, device, dtype)


def _rope_errors(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for head_dim in (64, 80, 128):
        qkv = randn_on(33, 12, head_dim, device=device, dtype=dtype)
        angles = randn_on(33, head_dim // 2, device=device, dtype=torch.float32)
        cos_TF, sin_TF = angles.cos().to(dtype), angles.sin().to(dtype)
        pool = torch.zeros((7, 2, 2, 2, 5, head_dim), dtype=dtype, device=device)
        slots = torch.randperm(35, device=device)[:33]
        q_TND = rope_and_cache_write(
            qk_TAD=qkv[:, :10],
            v_THD=qkv[:, 10:],
            cos_TF=cos_TF,
            sin_TF=sin_TF,
            pool=pool,
            layer=1,
            block_T=slots // 5,
            slot_T=slots % 5,
        )
        a, b = qkv[:, :10].double().chunk(2, dim=-1)
        cos, sin = cos_TF.double()[:, None], sin_TF.double()[:, None]
        exact = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        written = pool[slots // 5, 1, :, :, slots % 5]
        report.error("rope", f"q, D={head_dim} {name}", q_TND, exact[:, :8])
        report.error("rope", f"k, D={head_dim} {name}", written[:, 0], exact[:, 8:])
        report.error("rope", f"v, D={head_dim} {name}", written[:, 1], qkv[:, 10:].double())


def _attention_errors(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    rows = [(1, 0), (5, 0), (1, 15), (1, 16), (0, 0), (1, 122), (45, 17), (1, 999), (130, 300)]
    name = str(dtype).removeprefix("torch.")
    # Each combination is a kernel of its own, and seconds to compile.
    options: list[dict[str, Any]] = [{}]
    if dtype == torch.bfloat16:
        options += [{"window": 7}, {"window": 200}, {"soft_cap": 5.0}]
    for heads, head_dim in (((4, 4), 64), ((6, 2), 80), ((8, 1), 96), ((8, 2), 128), ((4, 2), 256)):
        sinks_N = randn_on(heads[0], device=device, dtype=torch.float32)
        for option in (*options, {"sinks_N": sinks_N}):
            case = f"{heads[0]}/{heads[1]} D={head_dim} {' '.join(option)} {name}"
            with report.check("paged_attention", case):
                _attention_error(report, case, rows, heads, head_dim, dtype, device, option)


def _attention_error(
    report: Report,
    name: str,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    option: dict[str, Any],
) -> None:
    case = make_case(
        rows,
        heads=heads,
        head_dim=head_dim,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=str(device),
    )
    out_TND = paged_attention(
        case.q_TND, pool=case.pool, layer=case.layer, plan=case.packed(), **option
    )
    report.error("paged_attention", name, out_TND, case.expected(**option))


def _sample_error(report: Report, device: torch.device) -> None:
    """The device's draws against the same function's on the host."""
    logits_BV = 3 * randn_on(64, 1000, device=device, dtype=torch.float32)
    params = sample_params(64, device)
    ours = sample(logits_BV, **params)
    theirs = sample(logits_BV.cpu(), **{key: value.cpu() for key, value in params.items()})
    num_other = int((ours.cpu() != theirs).sum())
    # A sum in another order may move one edge of a distribution past u.
    report.add("sample", "64 x 1000", f"{num_other} draws differ", is_wrong=num_other > 1)


def sample_params(num_rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(1)
    ones_B = torch.ones(num_rows, device=device)
    return {
        "temperature_B": 0.8 * ones_B,
        "top_k_B": torch.full((num_rows,), 50, dtype=torch.int32, device=device),
        "tail_B": 0.1 * ones_B,
        "min_p_B": 0.02 * ones_B,
        "u_B": torch.rand(num_rows, generator=generator, device=device, dtype=torch.float64),
    }


def randn_on(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)
