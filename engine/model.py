"""One decoder for the llama family, in plain torch, over a packed batch and the block pool.

    token ids -> embedding -> norm -> layers x [ qkv -> (q, k norm) -> rope, KV into the pool
        -> attention over the pool -> o -> add, norm -> gate, up -> silu * -> down -> add, norm ]
        -> head -> logits, of the rows that draw

Runs on the engine thread, under torch.inference_mode, on the device of its weights: each op picks
its implementation by that. The order of roundings is that of transformers' modelling code.

Suffixes: T packed tokens, B rows that draw, V vocabulary, E hidden dim, N query heads, H kv heads,
A = N + H, D head dim.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from engine.batch import Batch
from engine.model_config import ModelConfig, read_model_config
from engine.rope import cos_and_sin, inverse_frequencies
from engine.weights import LayerWeights, ModelWeights, Progress, load_weights, torch_linear
from kernels.linear import Linear
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_and_cache_write import rope_and_cache_write
from kernels.silu_and_mul import silu_and_mul

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Decoder:
    """A loaded model. Stateless between calls: what it remembers is in the pool."""

    def __init__(self, *, config: ModelConfig, weights: ModelWeights[Linear]) -> None:
        self.config = config
        self.dtype = weights.embedding_VE.dtype
        self.device = weights.embedding_VE.device
        self._weights = weights
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(self.device)
        # What follows a layer: the next one's first norm, or the last norm of all.
        self._next_norms = (*(layer.input_norm_E for layer in weights.layers[1:]), weights.norm_E)

    def forward(self, batch: Batch, *, pool: torch.Tensor) -> torch.Tensor:
        """logits_BV in the model's dtype; writes the KV of every token of the batch into pool."""
        rope = cos_and_sin(
            batch.positions_T,
            self._inv_freq,
            dtype=self.dtype,
            attention_factor=self.config.rope.attention_factor,
        )
        x_TE = F.embedding(batch.token_ids_T, self._weights.embedding_VE)
        normed_TE = self._norm(x_TE, self._weights.layers[0].input_norm_E)
        for index, layer in enumerate(self._weights.layers):
            q_TND = self._write_kv(normed_TE, layer, index, batch, rope, pool)
            is_last = index == self.config.num_layers - 1
            if is_last and not batch.draws:
                break
            out_TND = paged_attention(
                q_TND,
                pool=pool,
                layer=index,
                plan=batch.attention,
                window=self.config.windows[index],
            )
            if is_last:
                # Past the last attention, tokens that draw nothing are of no use to anybody.
                x_TE, out_TND = x_TE[batch.last_B], out_TND[batch.last_B]
            normed_TE, x_TE = self._add_norm(layer.o(out_TND.flatten(1)), x_TE, layer.mlp_norm_E)
            mlp_TE = layer.down(silu_and_mul(layer.gate_up(normed_TE)))
            normed_TE, x_TE = self._add_norm(mlp_TE, x_TE, self._next_norms[index])
        if not batch.draws:
            return x_TE.new_empty(0, self.config.vocab_size)
        return self._weights.head(normed_TE)

    def _write_kv(
        self,
        normed_TE: torch.Tensor,
        layer: LayerWeights[Linear],
        index: int,
        batch: Batch,
        rope: tuple[torch.Tensor, torch.Tensor],
        pool: torch.Tensor,
    ) -> torch.Tensor:
        """Writes K and V of one layer into the pool, and returns rotated q_TND."""
        config = self.config
        num_qk_heads = config.num_query_heads + config.num_kv_heads
        qkv = layer.qkv(normed_TE)
        qkv = qkv.view(-1, num_qk_heads + config.num_kv_heads, config.head_dim)
        qk_TAD, v_THD = qkv[:, :num_qk_heads], qkv[:, num_qk_heads:]
        if layer.qk_norm_AD is not None:
            qk_TAD = self._norm(qk_TAD, layer.qk_norm_AD)
        return rope_and_cache_write(
            qk_TAD=qk_TAD,
            v_THD=v_THD,
            cos_TF=rope[0],
            sin_TF=rope[1],
            pool=pool,
            layer=index,
            block_T=batch.block_T,
            slot_T=batch.slot_T,
        )

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, eps=self.config.rms_norm_eps)

    def _add_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x_TE, residual_TE, weight_E, eps=self.config.rms_norm_eps)


def load_model(
    folder: Path, *, dtype: str, device: str = "cpu", progress: Progress | None = None
) -> Decoder:
    """The model in a folder, computing in "bfloat16" or "float32" on "cpu" or "cuda".

    progress is called with elements done and in all. Raises ValueError, one line, for anything
    absent, damaged or unsupported.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    config = read_model_config(folder)
    with torch.inference_mode():
        weights = load_weights(
            folder,
            config,
            dtype=DTYPES[dtype],
            make_linear=torch_linear,
            device=device,
            progress=progress,
        )
    return Decoder(config=config, weights=weights)
