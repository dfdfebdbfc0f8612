"""Turns one GGUF file into a normal Hugging Face folder; run as `python -m engine.gguf_convert`.

    SRC.gguf --AutoConfig------> config.json, generation_config.json
             --dequantize------> model.safetensors (bf16, names and row order of Hugging Face)
             --AutoTokenizer---> tokenizer.json, tokenizer_config.json, chat_template.jinja

The only file of engine/ that imports transformers: engine/catalog.py runs it in a child process,
so that no node ever holds transformers or a tokenizer. The weights do not go through transformers:
its GGUF loader needs accelerate and refuses to save what it loaded. A tied lm_head is stored once.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers

# llama.cpp rotates neighbouring pairs for "llama" and halves, like Hugging Face, for the others:
# only llama's q and k rows are stored in another order.
_PAIRWISE_ROPE = {"llama": True, "qwen2": False, "qwen3": False}

# tokenizer.ggml.pre values whose split AutoTokenizer gets right, plus smollm, which is mended here.
# It falls back to the GPT-2 split in silence, so that an unknown value is refused.
_BYTE_LEVEL_SPLITS = ("gpt-2", "llama-bpe", "qwen2", "smollm")

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, *, folder: Path) -> None:
    """Writes the model in source to an existing folder. Needs memory for all weights in bf16.

    Raises ValueError for a file that is not GGUF and for an architecture, tensor or tokenizer that
    would not come out exactly right.
    """
    reader = GGUFReader(source)
    architecture = _architecture(reader)
    if architecture not in _PAIRWISE_ROPE:
        known = ", ".join(_PAIRWISE_ROPE)
        raise ValueError(f"architecture {architecture!r} is not supported ({known})")
    if _field(reader, f"{architecture}.rope.scaling.type", default="none") != "none":
        raise ValueError("scaled rope is not supported")
    _check_tokenizer(reader)
    config = _config(source, reader=reader)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ids = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = {key: value for key, value in ids.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = _weights(reader, config=config, pairwise_rope=_PAIRWISE_ROPE[architecture])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes it readable for nobody else.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    _save_tokenizer(source, reader=reader, folder=folder)


def _field(reader: GGUFReader, key: str, *, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _architecture(reader: GGUFReader) -> str:
    return str(_field(reader, "general.architecture"))


def _check_tokenizer(reader: GGUFReader) -> None:
    kind = _field(reader, "tokenizer.ggml.model")
    split = _field(reader, "tokenizer.ggml.pre")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer {kind!r} is not supported (gpt2, llama)")
    if kind == "gpt2" and split not in _BYTE_LEVEL_SPLITS:
        known = ", ".join(_BYTE_LEVEL_SPLITS)
        raise ValueError(f"pre-tokenizer {split!r} is not supported ({known})")


def _config(source: Path, *, reader: GGUFReader) -> dict[str, Any]:
    from transformers import AutoConfig

    loaded = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config: dict[str, Any] = loaded.to_diff_dict()
    # The folder depends on the file alone: nodes compare a digest of it.
    for key in ("_name_or_path", "_model_name_or_path", "transformers_version"):
        config.pop(key, None)
    model_type = str(config["model_type"])
    config["architectures"] = [f"{model_type.capitalize()}ForCausalLM"]
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    # GGUF keeps a float32: 1e-05 would come back as 9.999999747378752e-06.
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    # transformers overlooks it for some architectures and takes the class default.
    head_dim = _field(reader, f"{_architecture(reader)}.attention.key_length")
    if head_dim is not None:
        config["head_dim"] = int(head_dim)
    # Readers older than transformers 5 look for rope_theta at the top.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    # A chat model may end a turn with another token than a text.
    ends = [_field(reader, f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    eos_token_ids = list(dict.fromkeys(int(end) for end in ends if end is not None))
    config["eos_token_id"] = eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids
    return config


def _weights(
    reader: GGUFReader, *, config: dict[str, Any], pairwise_rope: bool
) -> dict[str, torch.Tensor]:
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        name, kind = _hugging_face_name(tensor.name)
        array = dequantize(tensor.data, tensor.tensor_type)
        if pairwise_rope and kind in num_heads:
            array = _halves_from_pairs(array, num_heads=num_heads[kind])
        # A copy, because an unquantized array is still the read-only file.
        weights[name] = torch.from_numpy(np.array(array, dtype=np.float32)).to(torch.bfloat16)
    _check_complete(set(weights), num_layers=config["num_hidden_layers"])
    return weights


def _hugging_face_name(name: str) -> tuple[str, str]:
    """A tensor's name in a Hugging Face checkpoint, and what it is (`attn_q`)."""
    *prefix, kind, suffix = name.split(".")
    if not prefix and kind in _TOP_NAMES:
        return f"{_TOP_NAMES[kind]}.{suffix}", kind
    if len(prefix) == 2 and prefix[0] == "blk" and kind in _LAYER_NAMES:
        return f"model.layers.{prefix[1]}.{_LAYER_NAMES[kind]}.{suffix}", kind
    # Experts, scaled rope and the like: dropping them would give a model that only looks right.
    raise ValueError(f"tensor {name!r} is not supported")


def _halves_from_pairs(rows: NDArray[Any], *, num_heads: int) -> NDArray[Any]:
    """Undoes the row order of llama.cpp's convert_hf_to_gguf.py (`permute`)."""
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _check_complete(names: set[str], *, num_layers: int) -> None:
    kinds = [kind for key, kind in _LAYER_NAMES.items() if not key.endswith(("q_norm", "k_norm"))]
    expected = {f"model.layers.{n}.{kind}.weight" for n in range(num_layers) for kind in kinds}
    missing = (expected | {"model.embed_tokens.weight", "model.norm.weight"}) - names
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, among them {min(missing)!r}")


def _save_tokenizer(source: Path, *, reader: GGUFReader, folder: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded.save_pretrained(folder)
    if _field(reader, "tokenizer.ggml.pre") == "smollm":
        _split_digits(folder / "tokenizer.json")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # With a model's own class, transformers would rebuild the splitting instead of reading it.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["add_bos_token"] = bool(_field(reader, "tokenizer.ggml.add_bos_token", default=False))
    config["model_max_length"] = int(_field(reader, f"{_architecture(reader)}.context_length"))
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _split_digits(path: Path) -> None:
    """SmolLM was trained on single digits; AutoTokenizer leaves them whole, as GPT-2 does."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save(str(path))


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m engine.gguf_convert SRC.gguf DST_FOLDER\n")
        return 2
    source, folder = (Path(argument).absolute() for argument in arguments)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        convert(source, folder=folder)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
