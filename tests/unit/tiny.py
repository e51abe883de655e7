"""A tiny checkpoint without bytes: what passes need and nothing more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapeout.compiler.checkpoints import Checkpoint, TensorInfo
from tapeout.compiler.devices import Device, load_device
from tapeout.compiler.pipeline import Results
from tapeout.compiler.spec import Model, Quantization, Serving, Topology
from tapeout.passes import PIPELINE

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a Llama config."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (q, hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, q),
            f"{at}.mlp.gate_proj.weight": (ffn, hidden),
            f"{at}.mlp.up_proj.weight": (ffn, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ffn),
        }
    return found


def checkpoint(
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    config: Mapping[str, Any] = CONFIG,
    formats: Mapping[str, str] | None = None,
) -> Checkpoint:
    """A safetensors checkpoint of these tensors; matrices are bf16 unless ``formats`` says otherwise."""
    formats = formats or {}
    infos = {
        name: TensorInfo(name, shape, formats.get(name, "bf16"), Path("model.safetensors"), 0, 0)
        for name, shape in sorted((tensors or shapes(config)).items())
    }
    return Checkpoint("safetensors", Path("tiny"), infos, config)


def compile_tiny(
    source: Checkpoint | None = None,
    quantization: Quantization | None = None,
    serving: Serving | None = None,
    topology: Topology | None = None,
    device: Device | None = None,
) -> Results:
    """The pipeline over a tiny checkpoint."""
    return PIPELINE.run(
        Model(source="tiny"),
        source or checkpoint(),
        quantization or Quantization(),
        serving or Serving(),
        topology or Topology(),
        device or load_device("cpu"),
    )
