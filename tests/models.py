"""Tiny random models with real tokenizers, as folders that every part of the project can serve.

    folder = make_tiny_model(tmp_path / "m", "qwen3", num_key_value_heads=6)
    reference_greedy(folder, prompt, num_tokens=8) -> what transformers generates

Weights are drawn so that logits differ by more than rounding: transformers' own initial values
give a model whose tokens are all nearly as likely.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Token ids 0 to 255 are bytes.
BOS, START, EOS = 256, 257, 258
VOCAB_SIZE = 259

_SPECIAL = ("<|begin|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Three query heads per kv head; nothing divides anything by accident.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def make_tiny_model(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes a servable model of a transformers model_type into folder, and returns folder.

    overrides are fields of its config. Every weight is random, norms and biases too.
    """
    fields = {**_SIZES, **({"sliding_window": None} if architecture == "mistral" else {})}
    config = AutoConfig.for_model(architecture, **(fields | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    # Else transformers would write the sampling defaults of a config that nobody set.
    model.generation_config.eos_token_id = config.eos_token_id
    model.to(dtype).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def reference_model(folder: Path) -> Any:
    """transformers' model of a folder, in float32, with the plain attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def reference_greedy(model: Any, prompt: list[int], *, num_tokens: int) -> list[int]:
    """num_tokens ids after prompt; end-of-sequence tokens are ordinary ones."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5)


def _write_tokenizer(folder: Path) -> None:
    """Byte level: a byte is its own id, and text is as many tokens as it has bytes."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[2],
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
