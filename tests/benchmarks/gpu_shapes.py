"""The models that GPU benchmarks run: real shapes with random weights, as specs and as checkpoints without bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Config = dict[str, Any]

LLAMA_1B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
LLAMA_8B: Config = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "rope_scaling": LLAMA_1B["rope_scaling"] | {"factor": 8.0},
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """One artifact to compile: a shape, the format of its matrices, and what it serves.

    ``weights_of`` names a case whose weights file this one shares: same shape and format, other serving.
    """

    name: str
    config: Config
    format: str
    serving: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights_of: str = ""

    def cut(self, layers: int) -> Case:
        """The same with few layers, small enough for a float64 reference."""
        return replace(
            self, name=f"{self.name}-{layers}l", config=self.config | {"num_hidden_layers": layers}, weights_of=""
        )


_ONE = {"max_context": 8192, "max_sequences": 1, "prefill_chunk": 2048}
_LONG = {**_ONE, "max_context": 131072}
_BATCH = {"max_context": 2112, "max_sequences": 64, "prefill_chunk": 2048, "decode_buckets": (1, 64)}

FULL = (
    Case("1b-bf16", LLAMA_1B, "keep", _ONE),
    Case("8b-q4_0", LLAMA_8B, "q4_0", _ONE),
    Case("8b-q4_0-128k", LLAMA_8B, "q4_0", _LONG, "8b-q4_0"),
    Case("8b-int4_g128", LLAMA_8B, "int4_g128", _ONE),
    Case("8b-bf16", LLAMA_8B, "keep", _BATCH),
)
CUT = (
    FULL[0].cut(4),
    FULL[1].cut(2),
    FULL[3].cut(2),
    Case("8b-bf16", LLAMA_8B, "keep", _ONE).cut(2),
)
CASES = {case.name: case for case in (*FULL, *CUT)}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of every tensor of a Llama."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
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
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def write_sparse(folder: Path, config: Mapping[str, Any]) -> Path:
    """A BF16 checkpoint folder whose header is real and whose data is a hole in the file: no disk, no reading."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensor_shapes(config).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder
