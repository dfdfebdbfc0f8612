"""gpu_check's kernels against the machine's limits, at the sizes of real models.

Public functions of kernels/ are called, but for --tune, which goes through the attention kernel's
tiles. Suffixes: T packed tokens, E hidden dim, F inner dim, K blocks, B rows, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.attention_case import AttentionCase
from bench.gpu_kernels import BLOCK_SIZE, randn_on, sample_params
from bench.gpu_report import Report
from kernels.block_copy import pack_blocks, unpack_blocks
from kernels.packed_rows import AttentionRow
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_and_cache_write import rope_and_cache_write
from kernels.sample import greedy, sample
from kernels.silu_and_mul import silu_and_mul


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of what is timed."""

    num_tokens: int
    hidden: int
    inner: int
    heads: tuple[int, int]
    head_dim: int
    vocab: int
    decode: tuple[tuple[int, int], ...]
    chunks: tuple[tuple[int, int], ...]


# Llama-3-8B's, with Qwen3's vocabulary; decode is (rows, context), chunks (queries, keys before).
FULL = Sizes(
    num_tokens=4096,
    hidden=4096,
    inner=14_336,
    heads=(32, 8),
    head_dim=128,
    vocab=151_936,
    decode=((1, 1024), (1, 32_768), (16, 1024), (16, 8192), (64, 4096), (256, 1024)),
    chunks=((512, 0), (2048, 0), (2048, 6144), (8192, 0)),
)
TINY = Sizes(
    num_tokens=5,
    hidden=48,
    inner=88,
    heads=(6, 2),
    head_dim=16,
    vocab=259,
    decode=((1, 17), (3, 40)),
    chunks=((20, 0), (20, 33)),
)


def time_kernels(report: Report, sizes: Sizes, device: torch.device) -> None:
    for what, time_it in (
        ("elementwise", _time_elementwise),
        ("block_copy", _time_block_copy),
        ("sample", _time_sample),
        ("paged_attention", _time_attention),
    ):
        with report.check(what, "times"):
            time_it(report, sizes, device)


def _time_elementwise(report: Report, sizes: Sizes, device: torch.device) -> None:
    randn = partial(randn_on, device=device, dtype=torch.bfloat16)
    num_tokens = sizes.num_tokens
    for tokens in (1, num_tokens):
        x_TE, r_TE, w_E = (
            randn(tokens, sizes.hidden),
            randn(tokens, sizes.hidden),
            randn(sizes.hidden),
        )
        case = f"{tokens} x {sizes.hidden}"
        report.speed(
            "rms_norm", case, partial(rms_norm, x_TE, w_E, eps=1e-5), num_bytes=2 * x_TE.nbytes
        )
        report.speed(
            "add_rms_norm",
            case,
            partial(add_rms_norm, x_TE, r_TE, w_E, eps=1e-5),
            num_bytes=4 * x_TE.nbytes,
        )
        gate_up = randn(tokens, 2 * sizes.inner)
        report.speed(
            "silu_and_mul",
            f"{tokens} x {sizes.inner}",
            partial(silu_and_mul, gate_up),
            num_bytes=1.5 * gate_up.nbytes,
        )
        _time_rope(report, sizes, device, tokens)


def _time_rope(report: Report, sizes: Sizes, device: torch.device, num_tokens: int) -> None:
    randn = partial(randn_on, device=device, dtype=torch.bfloat16)
    num_query_heads, num_kv_heads = sizes.heads
    num_qk_heads = num_query_heads + num_kv_heads
    qkv = randn(num_tokens, num_qk_heads + num_kv_heads, sizes.head_dim)
    angles_TF = randn(num_tokens, sizes.head_dim // 2)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    pool = torch.zeros(
        (num_blocks, 2, 2, num_kv_heads, BLOCK_SIZE, sizes.head_dim),
        dtype=torch.bfloat16,
        device=device,
    )
    position_T = torch.arange(num_tokens, device=device, dtype=torch.int32)
    report.speed(
        "rope_and_cache_write",
        f"{num_tokens} x {num_query_heads}/{num_kv_heads} D={sizes.head_dim}",
        partial(
            rope_and_cache_write,
            qk_TAD=qkv[:, :num_qk_heads],
            v_THD=qkv[:, num_qk_heads:],
            cos_TF=angles_TF,
            sin_TF=angles_TF,
            pool=pool,
            layer=1,
            block_T=position_T // BLOCK_SIZE,
            slot_T=position_T % BLOCK_SIZE,
        ),
        num_bytes=2 * qkv.nbytes + 2 * angles_TF.nbytes,
    )


def _time_block_copy(report: Report, sizes: Sizes, device: torch.device) -> None:
    shape = (32, 2, sizes.heads[1], BLOCK_SIZE, sizes.head_dim)
    pool = torch.zeros((256, *shape), dtype=torch.bfloat16, device=device)
    staging = torch.zeros((64, *shape), dtype=torch.bfloat16, device=device)
    block_K = torch.randperm(256, device=device)[:64]
    for move in (pack_blocks, unpack_blocks):
        report.speed(
            move.__name__,
            f"64 blocks of {pool[0].nbytes >> 10} KiB",
            partial(move, pool, block_K=block_K, staging=staging),
            num_bytes=2 * staging.nbytes,
        )


def _time_sample(report: Report, sizes: Sizes, device: torch.device) -> None:
    for num_rows in (1, 256):
        logits_BV = randn_on(num_rows, sizes.vocab, device=device, dtype=torch.bfloat16)
        case = f"{num_rows} x {sizes.vocab}"
        report.speed("greedy", case, partial(greedy, logits_BV), num_bytes=logits_BV.nbytes)
        params = sample_params(num_rows, device)
        report.speed(
            "sample", case, partial(sample, logits_BV, **params), num_bytes=logits_BV.nbytes
        )


def _time_attention(report: Report, sizes: Sizes, device: torch.device) -> None:
    for num_rows, context in sizes.decode:
        case = _plain_case([(1, context - 1)] * num_rows, sizes, device)
        name = f"decode, {num_rows} rows of {context}"
        if not report.is_late("paged_attention", name):
            _time_case(report, name, case, num_bytes=_kv_bytes(case, num_rows * context))
    for queries, before in sizes.chunks:
        case = _plain_case([(queries, before)], sizes, device)
        name = f"chunk, {queries} after {before}"
        if not report.is_late("paged_attention", name):
            _time_case(report, name, case, flops=_chunk_flops(sizes, queries, before))


def _time_case(report: Report, name: str, case: AttentionCase, **work: float) -> None:
    rows = case.packed()
    report.speed(
        "paged_attention",
        name,
        partial(paged_attention, case.q_TND, pool=case.pool, layer=case.layer, plan=rows),
        **work,
    )


def tune(report: Report, sizes: Sizes, device: torch.device) -> None:
    """Times every tile of the attention kernel's spaces: the first is the chosen one."""
    from kernels.triton import paged_attention as fast
    from kernels.triton.attention_tiles import chunk_tiles, decode_tiles

    group_size = sizes.heads[0] // sizes.heads[1]
    for num_rows, context in sizes.decode:
        case = _plain_case([(1, context - 1)] * num_rows, sizes, device)
        run = partial(
            fast.paged_attention,
            case.q_TND,
            pool=case.pool,
            layer=case.layer,
            rows=case.packed(),
        )
        for tile in decode_tiles(group_size, sizes.head_dim, torch.bfloat16):
            for splits in (None, 1, 4, 16):
                name = f"{num_rows} x {context} {tile} splits={splits}"
                if report.is_late("tune decode", name):
                    return
                with report.check("tune decode", name):
                    report.speed(
                        "tune decode",
                        name,
                        partial(run, decode_tile=tile, num_splits=splits),
                        num_bytes=_kv_bytes(case, num_rows * context),
                    )
    for queries, before in sizes.chunks:
        case = _plain_case([(queries, before)], sizes, device)
        run = partial(
            fast.paged_attention,
            case.q_TND,
            pool=case.pool,
            layer=case.layer,
            rows=case.packed(),
        )
        for tile in chunk_tiles(group_size, sizes.head_dim, torch.bfloat16):
            name = f"{queries} after {before} {tile}"
            if report.is_late("tune chunk", name):
                return
            with report.check("tune chunk", name):
                report.speed(
                    "tune chunk",
                    name,
                    partial(run, chunk_tile=tile),
                    flops=_chunk_flops(sizes, queries, before),
                )


def _plain_case(rows: list[tuple[int, int]], sizes: Sizes, device: torch.device) -> AttentionCase:
    """One layer, blocks in order of a shuffle, made at once: make_case would take seconds."""
    lengths = [-(-(queries + before) // BLOCK_SIZE) for queries, before in rows]
    blocks = torch.randperm(sum(lengths)).tolist()
    tables: Iterator[list[int]] = (
        [blocks.pop() for _ in range(num_blocks)] for num_blocks in lengths
    )
    first, built = 0, []
    for (queries, before), table in zip(rows, tables, strict=True):
        built.append(
            AttentionRow(
                first_token=first,
                num_tokens=queries,
                context_len=queries + before,
                block_table=table,
            )
        )
        first += queries
    randn = partial(randn_on, device=device, dtype=torch.bfloat16)
    return AttentionCase(
        q_TND=randn(first, sizes.heads[0], sizes.head_dim),
        pool=randn(sum(lengths), 1, 2, sizes.heads[1], BLOCK_SIZE, sizes.head_dim),
        layer=0,
        rows=tuple(built),
    )


def _kv_bytes(case: AttentionCase, num_keys: int) -> float:
    return float(num_keys * 2 * case.pool.shape[3] * case.pool.shape[5] * case.pool.element_size())


def _chunk_flops(sizes: Sizes, queries: int, before: int) -> float:
    """Two products of two operations for each key that a query sees."""
    num_seen = queries * before + queries * (queries + 1) / 2
    return 4.0 * sizes.heads[0] * sizes.head_dim * num_seen
