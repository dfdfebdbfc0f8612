"""Models of real shapes with random weights, made on the device: for speed, not for text.

random_model("llama-3-8b", device) -> Decoder, as if loaded from a folder
"""

from typing import Any

import torch

from engine.model import Decoder
from engine.model_config import ModelConfig, parse_model_config
from engine.weights import LayerWeights, ModelWeights
from kernels.linear import Linear

# The fields of each model's config.json that matter here. "tiny" is for machines without a GPU.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    },
    "tiny": {
        "model_type": "qwen3",
        "vocab_size": 259,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    },
}


def random_model(name: str, device: torch.device, *, dtype: torch.dtype) -> Decoder:
    """A model of SHAPES. Norms are 1 and matrices keep variance, so that nothing overflows."""
    config = parse_model_config(SHAPES[name], {})
    with torch.inference_mode():
        return Decoder(config=config, weights=_random_weights(config, device, dtype))


def _random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> ModelWeights[Linear]:
    generator = torch.Generator(device=device).manual_seed(0)
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    num_qk_heads = config.num_query_heads + config.num_kv_heads

    def matrix(out_features: int, in_features: int) -> torch.Tensor:
        weight_OI = torch.empty((out_features, in_features), dtype=dtype, device=device)
        return weight_OI.normal_(0.0, in_features**-0.5, generator=generator)

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    layers = tuple(
        LayerWeights(
            input_norm_E=ones(hidden),
            qkv=Linear(matrix((num_qk_heads + config.num_kv_heads) * head_dim, hidden)),
            qk_norm_AD=ones(num_qk_heads, head_dim) if config.qk_norm else None,
            o=Linear(matrix(hidden, config.num_query_heads * head_dim)),
            mlp_norm_E=ones(hidden),
            gate_up=Linear(matrix(2 * inner, hidden)),
            down=Linear(matrix(hidden, inner)),
        )
        for _ in range(config.num_layers)
    )
    embedding_VE = matrix(config.vocab_size, hidden)
    head_VE = embedding_VE if config.tie_embeddings else matrix(config.vocab_size, hidden)
    return ModelWeights(
        embedding_VE=embedding_VE, layers=layers, norm_E=ones(hidden), head=Linear(head_VE)
    )


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes that a decode step reads of the weights, at least: all but the embedding."""
    head_dim, hidden = config.head_dim, config.hidden_size
    attention = 2 * (config.num_query_heads + config.num_kv_heads) * head_dim * hidden
    layer = attention + 3 * hidden * config.intermediate_size
    return itemsize * (config.num_layers * layer + config.vocab_size * hidden)
