"""A small random Llama checkpoint on disk, in both containers, made with numpy, safetensors and gguf-py alone.

For tests that are about files, bytes and errors; where values matter, tests/parity/witness.py has a reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Arrays = dict[str, npt.NDArray[Any]]

EOS = "<|im_end|>"
LETTERS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
TOKENS = [*LETTERS, "th", "the", *(f"<unused{index}>" for index in range(61)), EOS]
MERGES = ["t h", "th e"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": len(TOKENS) - 1,
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of every tensor, the head tied to the embedding."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    for index in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return found


def tensors(config: Mapping[str, Any] = CONFIG, seed: int = 0) -> Arrays:
    """Random float32 values for every tensor."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32) * (0.1 if len(shape) > 1 else 1.0)
        for name, shape in shapes(config).items()
    }


def write_folder(
    folder: Path, arrays: Arrays | None = None, config: Mapping[str, Any] = CONFIG, shards: int = 1
) -> Path:
    """A checkpoint folder as on the hub; tensors lie in the files in the order of ``arrays``."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = tensors(config) if arrays is None else arrays
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    weight_map = {name: names[index * shards // len(arrays)] for index, name in enumerate(arrays)}
    for file in names:
        save_file(
            {name: arrays[name] for name, owner in weight_map.items() if owner == file},
            folder / (file if shards > 1 else "model.safetensors"),
        )
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, tokens: Sequence[str] = TOKENS) -> None:
    """tokenizer.json and its config: byte-level BPE with two merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[(left, right) for left, right in map(str.split, MERGES)])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": TEMPLATE}))


def write_gguf(
    path: Path,
    arrays: Arrays | None = None,
    kinds: Mapping[str, str] | None = None,
    arch: str = "llama",
    config: Mapping[str, Any] = CONFIG,
) -> Path:
    """The same as a GGUF. Matrices are Q8_0 unless ``kinds`` has another type for the tensor's Hugging Face name.

    Tensors that GGUF has no name for keep theirs.
    """
    writer = gguf.GGUFWriter(path, arch)
    _metadata(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1000)
    for name, values in (tensors(config) if arrays is None else arrays).items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "Q8_0") if values.ndim > 1 else "F32"]
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token == EOS else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_chat_template(TEMPLATE)


def write_spec(path: Path, source: Path, **sections: Mapping[str, Any]) -> Path:
    """A spec (JSON is YAML) for a checkpoint; ``sections`` are added to it."""
    serving = {"max_context": 256, **sections.pop("serving", {})}
    path.write_text(json.dumps({"model": {"source": str(source)}, "serving": serving, **sections}))
    return path
