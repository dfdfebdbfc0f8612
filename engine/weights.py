"""A model's weights in the shape that the forward pass wants them.

    Checkpoint --load_weights--> ModelWeights{embedding, layers: LayerWeights, norm, head}

Q, K and V are one matrix, gate and up another: one pass over the activations instead of three and
two. Every tensor of the checkpoint must be used or known to be dead: a bias that nobody reads
would otherwise be a wrong model and no error.

Suffixes: V vocabulary, E hidden dim, A query and kv heads, D head dim, I in features, O out
features.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint, model_digest
from engine.model_config import ModelConfig
from kernels.linear import Linear

__all__ = ["LayerWeights", "ModelWeights", "load_weights", "model_digest"]

# Buffers that old checkpoints hold and that are computed instead.
_DEAD = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

# Called with elements done and elements in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """qkv's outputs are all query heads, then all kv heads of K, then of V; gate_up's gate, up.

    qk_norm_AD is the norm of each of those query and K heads.
    """

    input_norm_E: torch.Tensor
    qkv: Linear
    qk_norm_AD: torch.Tensor | None
    o: Linear
    mlp_norm_E: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """Read-only; the embedding may be a view of the mapped file."""

    embedding_VE: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_E: torch.Tensor
    head: Linear


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, progress: Progress | None = None
) -> ModelWeights:
    """The folder's weights, converted to dtype. Raises ValueError, one line, if any is amiss."""
    reader = _Reader(Checkpoint(folder), dtype, progress)
    embedding_VE = reader.read("model.embed_tokens", config.vocab_size, config.hidden_size)
    layers = tuple(_load_layer(reader, config, index) for index in range(config.num_layers))
    norm_E = reader.read("model.norm", config.hidden_size)
    if config.tie_embeddings:
        head_VE = embedding_VE
        reader.skip("lm_head.weight")
    else:
        head_VE = reader.read("lm_head", config.vocab_size, config.hidden_size)
    reader.finish()
    return ModelWeights(
        embedding_VE=embedding_VE, layers=layers, norm_E=norm_E, head=Linear(head_VE)
    )


def _load_layer(reader: "_Reader", config: ModelConfig, index: int) -> LayerWeights:
    layer = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    q_out = config.num_query_heads * config.head_dim
    kv_out = config.num_kv_heads * config.head_dim
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    qkv = {
        f"{attention}.q_proj": q_out,
        f"{attention}.k_proj": kv_out,
        f"{attention}.v_proj": kv_out,
    }
    gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
    return LayerWeights(
        input_norm_E=reader.read(f"{layer}.input_layernorm", hidden),
        qkv=reader.linear(qkv, hidden, bias=config.qkv_bias),
        qk_norm_AD=_qk_norm(reader, config, attention) if config.qk_norm else None,
        o=reader.linear({f"{attention}.o_proj": hidden}, q_out, bias=config.o_bias),
        mlp_norm_E=reader.read(f"{layer}.post_attention_layernorm", hidden),
        gate_up=reader.linear(gate_up, hidden, bias=config.mlp_bias),
        down=reader.linear({f"{mlp}.down_proj": hidden}, inner, bias=config.mlp_bias),
    )


def _qk_norm(reader: "_Reader", config: ModelConfig, attention: str) -> torch.Tensor:
    q_norm_D = reader.read(f"{attention}.q_norm", config.head_dim)
    k_norm_D = reader.read(f"{attention}.k_norm", config.head_dim)
    return torch.cat(
        (q_norm_D.expand(config.num_query_heads, -1), k_norm_D.expand(config.num_kv_heads, -1))
    )


class _Reader:
    """Reads tensors in dtype and remembers which, for progress and for finish()."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._unused = set(checkpoint)
        self._num_done = 0
        self._num_elements = checkpoint.num_elements()

    def read(self, module: str, *shape: int, part: str = "weight") -> torch.Tensor:
        name = f"{module}.{part}"
        tensor = self._checkpoint.tensor(name, shape).to(self._dtype)
        self._unused.discard(name)
        self._num_done += tensor.numel()
        if self._progress is not None:
            self._progress(self._num_done, self._num_elements)
        return tensor

    def linear(self, modules: dict[str, int], in_features: int, *, bias: bool) -> Linear:
        """One matrix from modules of these out features, in order."""
        weights = [self.read(module, out, in_features) for module, out in modules.items()]
        biases = [self.read(module, out, part="bias") for module, out in modules.items() if bias]
        return Linear(torch.cat(weights), torch.cat(biases) if bias else None)

    def skip(self, name: str) -> None:
        self._unused.discard(name)

    def finish(self) -> None:
        """Raises ValueError if the checkpoint holds what nobody read."""
        leftover = sorted(name for name in self._unused if not _DEAD.fullmatch(name))
        if leftover:
            raise ValueError(
                f"{self._checkpoint.folder}: tensor {leftover[0]} is not part of this "
                f"architecture ({len(leftover)} such)"
            )
        if self._progress is not None:
            self._progress(self._num_elements, self._num_elements)
