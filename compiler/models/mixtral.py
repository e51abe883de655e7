"""Mixtral (``MixtralForCausalLM``; GGUF ``llama`` with experts): Mistral whose MLPs are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.models import experts, llama, names
from tapeout.compiler.models.base import Family, Fields, Sources
from tapeout.compiler.models.llama import LlamaConfig

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def parse_hf(raw: Mapping[str, Any]) -> LlamaConfig:
    """From config.json; defaults are those of ``configuration_mixtral.py``."""
    fields = Fields({**DEFAULTS, **raw}, "config.json")
    fields.refuse("layer_types", "attention_bias", "mlp_bias")
    common = names.hf_common(fields, context=131072)
    routed = experts.hf_experts(fields, count=8, top_k=2, width=common["ffn"], normalize=True)
    window = 0 if fields.raw.get("sliding_window") is None else fields.integer("sliding_window")
    return LlamaConfig(**common, attention_bias=False, mlp_bias=False, window=window, experts=routed)


def hf(config: LlamaConfig) -> Sources:
    """Every expert has tensors of its own, w1 (gate), w3 (up) and w2 (down)."""
    assert config.experts is not None
    return experts.hf_sources(names.HF_SOURCES, config.experts.count, "block_sparse_moe", PROJECTIONS)


FAMILY = Family("mixtral", parse_hf, llama.parse_gguf, hf, llama.gguf, llama.constants, llama.forward)
