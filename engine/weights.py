"""A model's weights in the shape that the forward pass wants them.

    Checkpoint --load_weights--> ModelWeights{embedding, layers: LayerWeights, norm, head}

Q, K and V are one matrix, gate and up another: one pass over the activations instead of three and
two. Every tensor of the checkpoint must be used or known to be dead: a bias that nobody reads
would otherwise be a wrong model and no error. How a matrix is kept is the caller's choice:
make_linear gets its role ("qkv", "o", "gate_up", "down", "head"), weight_OI and bias_O.

Suffixes: V vocabulary, E hidden dim, A query and kv heads, D head dim, I in features, O out
features.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from engine.checkpoint import Checkpoint, model_digest
from engine.model_config import ModelConfig
from kernels.linear import Linear

__all__ = ["LayerWeights", "ModelWeights", "load_weights", "model_digest"]

# Buffers that old checkpoints hold and that are computed instead.
_DEAD = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

# Called with elements done and elements in all.
Progress = Callable[[int, int], None]

L = TypeVar("L")
MakeLinear = Callable[[str, torch.Tensor, torch.Tensor | None], L]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(Generic[L]):
    """qkv's outputs are all query heads, then all kv heads of K, then of V; gate_up's gate, up.

    qk_norm_AD is the norm of each of those query and K heads.
    """

    input_norm_E: torch.Tensor
    qkv: L
    qk_norm_AD: torch.Tensor | None
    o: L
    mlp_norm_E: torch.Tensor
    gate_up: L
    down: L


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights(Generic[L]):
    """Read-only; the embedding may be a view of the mapped file."""

    embedding_VE: torch.Tensor
    layers: tuple[LayerWeights[L], ...]
    norm_E: torch.Tensor
    head: L


def torch_linear(role: str, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
    """What the torch path multiplies with, whatever the role."""
    return Linear(weight_OI, bias_O)


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    make_linear: MakeLinear[L],
    device: str = "cpu",
    progress: Progress | None = None,
) -> ModelWeights[L]:
    """The folder's weights, as dtype on device. Raises ValueError, one line, if any is amiss."""
    reader = _Reader(Checkpoint(folder), dtype, device, progress)
    embedding_VE = reader.read("model.embed_tokens", config.vocab_size, config.hidden_size)
    layers = tuple(
        _load_layer(reader, config, index, make_linear) for index in range(config.num_layers)
    )
    norm_E = reader.read("model.norm", config.hidden_size)
    if config.tie_embeddings:
        head_VE = embedding_VE
        reader.skip("lm_head.weight")
    else:
        head_VE = reader.read("lm_head", config.vocab_size, config.hidden_size)
    reader.finish()
    return ModelWeights(
        embedding_VE=embedding_VE,
        layers=layers,
        norm_E=norm_E,
        head=make_linear("head", head_VE, None),
    )


def _load_layer(
    reader: "_Reader", config: ModelConfig, index: int, make_linear: MakeLinear[L]
) -> LayerWeights[L]:
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
        qkv=make_linear("qkv", *reader.matrix(qkv, hidden, bias=config.qkv_bias)),
        qk_norm_AD=_qk_norm(reader, config, attention) if config.qk_norm else None,
        o=make_linear(
            "o", *reader.matrix({f"{attention}.o_proj": hidden}, q_out, bias=config.o_bias)
        ),
        mlp_norm_E=reader.read(f"{layer}.post_attention_layernorm", hidden),
        gate_up=make_linear("gate_up", *reader.matrix(gate_up, hidden, bias=config.mlp_bias)),
        down=make_linear(
            "down", *reader.matrix({f"{mlp}.down_proj": hidden}, inner, bias=config.mlp_bias)
        ),
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
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: str,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._unused = set(checkpoint)
        self._num_done = 0
        self._num_elements = checkpoint.num_elements()

    def read(self, module: str, *shape: int, part: str = "weight") -> torch.Tensor:
        name = f"{module}.{part}"
        tensor = self._checkpoint.tensor(name, shape).to(self._device, self._dtype)
        self._unused.discard(name)
        self._num_done += tensor.numel()
        if self._progress is not None:
            self._progress(self._num_done, self._num_elements)
        return tensor

    def matrix(
        self, modules: dict[str, int], in_features: int, *, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One weight and bias from modules of these out features, in order."""
        weights = [self.read(module, out, in_features) for module, out in modules.items()]
        biases = [self.read(module, out, part="bias") for module, out in modules.items() if bias]
        return torch.cat(weights), torch.cat(biases) if biases else None

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
