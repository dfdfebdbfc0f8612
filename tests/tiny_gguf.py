"""A tiny model as a .gguf file, written the way llama.cpp's convert_hf_to_gguf.py writes one.

    source = make_tiny_model(...)             a Hugging Face folder (tests/models.py)
    write_tiny_gguf(path, source=source)      the same weights and a byte-level tokenizer

Token ids: 0 to 255 bytes, 256 <|begin|>, 257 <|im_start|>, 258 <|im_end|>, 259 "12" (a merge).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import load_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

TINY_VOCAB_SIZE = 260
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_CONTROL, _NORMAL = 3, 1
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    *,
    source: Path,
    pre: str = "smollm",
    architecture: str | None = None,
    eot_token_id: int | None = None,
    rope_scaling: str | None = None,
    without: str = "",
    extra: dict[str, Any] | None = None,
) -> Path:
    """Writes source's weights to path; the options say what to get wrong or add."""
    config = json.loads((source / "config.json").read_text())
    writer = GGUFWriter(path, architecture or config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(TINY_VOCAB_SIZE)
    if rope_scaling is not None:
        writer.add_string(f"{config['model_type']}.rope.scaling.type", rope_scaling)
    _add_tokenizer(writer, pre=pre, eot_token_id=eot_token_id)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, rows in load_file(source / "model.safetensors").items():
        llama_name = _llama_cpp_name(name)
        kind = llama_name.split(".")[-2]
        if config["model_type"] == "llama" and kind in heads:
            rows = _pairs_from_halves(rows, num_heads=heads[kind])
        if llama_name != without:
            writer.add_tensor(llama_name, np.ascontiguousarray(rows))
    for name, rows in (extra or {}).items():
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, *, pre: str, eot_token_id: int | None) -> None:
    characters = bytes_to_unicode()
    specials = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*(characters[byte] for byte in range(256)), *specials, "12"])
    writer.add_token_types([_NORMAL] * 256 + [_CONTROL] * 3 + [_NORMAL])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    if eot_token_id is not None:
        writer.add_eot_token_id(eot_token_id)


def _llama_cpp_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{suffix}"
    _, _, layer, kind = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[kind]}.{suffix}"


def _pairs_from_halves(rows: Any, *, num_heads: int) -> Any:
    """llama.cpp's permute(), from its converter."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
