"""A model's weights as the C++ step reads them: packed, padded, and a struct of their addresses.

    load_weights(make_linear=packing) -> ModelWeights[PackedLinear] -> CModel

Heads are padded to 32 dims in qkv's outputs, in o's inputs and in the q and k norms; gate and up
are interleaved. Padding is zero, so that whatever meets it adds nothing.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from engine.model_config import ModelConfig
from engine.weights import LayerWeights, ModelWeights, Progress, load_weights
from kernels.cpu.arena import Arena
from kernels.cpu.library import CLayer, CModel
from kernels.cpu.packed_linear import PackedLinear, interleave_gate_up, pad_heads, padded


class NativeWeights:
    """Owner of a model's packed weights. c_struct is valid as long as this is."""

    def __init__(
        self, folder: Path, config: ModelConfig, *, progress: Progress | None = None
    ) -> None:
        """Raises ValueError, one line, if any weight is amiss."""
        arena = Arena()

        def make_linear(
            role: str, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
        ) -> PackedLinear:
            if role == "qkv":
                weight_OI = pad_heads(weight_OI, head_dim=config.head_dim, dim=0)
                if bias_O is not None:
                    bias_O = pad_heads(bias_O, head_dim=config.head_dim, dim=0)
            elif role == "o":
                weight_OI = pad_heads(weight_OI, head_dim=config.head_dim, dim=1)
            elif role == "gate_up":
                weight_OI = interleave_gate_up(weight_OI)
                bias_O = None if bias_O is None else interleave_gate_up(bias_O)
            return PackedLinear(weight_OI, bias_O, arena=arena)

        self._weights: ModelWeights[PackedLinear] = load_weights(
            folder, config, dtype=torch.bfloat16, make_linear=make_linear, progress=progress
        )
        self._kept: list[torch.Tensor] = []
        self._layers = (CLayer * config.num_layers)(
            *(
                self._layer(layer, window or 0)
                for layer, window in zip(self._weights.layers, config.windows, strict=True)
            )
        )
        self.c_struct = self._model(config)

    def _model(self, config: ModelConfig) -> CModel:
        return CModel(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            hidden_p=padded(config.hidden_size),
            inner_p=padded(config.intermediate_size),
            num_q_heads=config.num_query_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            head_dim_p=padded(config.head_dim),
            vocab=config.vocab_size,
            vocab_p=padded(config.vocab_size),
            embedding=self._keep(self._weights.embedding_VE),
            layers=self._layers,
            norm=self._keep_padded(self._weights.norm_E),
            head=self._weights.head.c_struct,
            eps=config.rms_norm_eps,
            attention_scale=config.head_dim**-0.5,
        )

    def _layer(self, layer: LayerWeights[PackedLinear], window: int) -> CLayer:
        return CLayer(
            input_norm=self._keep_padded(layer.input_norm_E),
            qkv=layer.qkv.c_struct,
            qk_norm=None if layer.qk_norm_AD is None else self._keep_padded(layer.qk_norm_AD),
            o=layer.o.c_struct,
            mlp_norm=self._keep_padded(layer.mlp_norm_E),
            gate_up=layer.gate_up.c_struct,
            down=layer.down.c_struct,
            window=window,
        )

    def _keep_padded(self, norm: torch.Tensor) -> int:
        return self._keep(F.pad(norm, (0, padded(norm.shape[-1]) - norm.shape[-1])))

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()
