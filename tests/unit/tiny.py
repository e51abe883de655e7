"""A tiny checkpoint without bytes: what passes need and nothing more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import small_model

from tapeout.compiler.checkpoints import Checkpoint, TensorInfo
from tapeout.compiler.devices import Device, load_device
from tapeout.compiler.lowering.choice import KernelBuilder
from tapeout.compiler.pipeline import Results
from tapeout.compiler.spec import Model, Quantization, Serving, Topology
from tapeout.compiler.stages import Purpose
from tapeout.passes import PIPELINE

CONFIG: Mapping[str, Any] = {**small_model.CONFIG, "vocab_size": 128, "max_position_embeddings": 256}


def shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a config of Llama or of a family of its shape."""
    found = small_model.shapes(config)
    sizes = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn"
        if config["architectures"] == ["Qwen2ForCausalLM"]:
            found |= {f"{at}.{part}_proj.bias": (heads * config["head_dim"],) for part, heads in sizes.items()}
        if config["architectures"] == ["Qwen3ForCausalLM"]:
            found |= {f"{at}.{part}_norm.weight": (config["head_dim"],) for part in "qk"}
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
    builder: KernelBuilder | None = None,
) -> Results:
    """The pipeline over a tiny checkpoint."""
    return PIPELINE.run(
        Model(source="tiny"),
        source or checkpoint(),
        quantization or Quantization(),
        serving or Serving(),
        topology or Topology(),
        device or load_device("cpu"),
        builder or KernelBuilder(Path("unused")),
        Purpose(),
    )
