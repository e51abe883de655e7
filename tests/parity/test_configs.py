"""Configs in the spellings of the hub, as transformers understands them: windows, heads, rotary frequencies."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tapeout.compiler.models import find_family

SIZES: Mapping[str, Any] = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 6,
                            "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# the family, and what a config.json says beside SIZES
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-v0.1": ("Mistral", {"rope_theta": 10000.0, "sliding_window": 4096}),
    "mistral-v0.3": ("Mistral", {"rope_theta": 1000000.0, "sliding_window": None, "head_dim": None}),
    "mistral-nemo": ("Mistral", {"rope_theta": 1000000.0, "sliding_window": None, "head_dim": 24}),
    "mistral-defaults": ("Mistral", {}),
    "qwen2.5": (
        "Qwen2",
        {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 5},
    ),
    "qwen2-defaults": ("Qwen2", {}),
    "qwen2-head-dim": ("Qwen2", {"head_dim": 16}),
    "qwen2-upper-layers-slide": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}),
    "qwen2-default-window": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen2-layer-types": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "qwen2.5-yarn": ("Qwen2", {"rope_theta": 1000000.0, "rope_scaling": YARN, "max_position_embeddings": 64}),
    "qwen3": ("Qwen3", {"rope_theta": 1000000, "rope_scaling": None, "sliding_window": None, "max_window_layers": 6}),
    "qwen3-without-head-dim": ("Qwen3", {"rope_theta": 1e6}),
    "qwen3-window-not-used": ("Qwen3", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}),
    "qwen3-upper-layers-slide": ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}),
    "qwen3-all-layers-slide": ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    "qwen3-null-window": ("Qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    "qwen3-default-window": ("Qwen3", {"use_sliding_window": True, "max_window_layers": 3}),
    "qwen3-layer-types": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 6,
         "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "qwen3-yarn": ("Qwen3", {"rope_theta": 1e6, "rope_scaling": YARN, "max_position_embeddings": 64}),
    "qwen3-rope-parameters": ("Qwen3", {"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 5e5}}),
    "qwen3-original-context-of-the-config": (
        "Qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 256},
    ),
    "gpt-oss": (
        "GptOss",
        {"attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
         "initial_context_length": 4096, "layer_types": ["sliding_attention", "full_attention"] * 3,
         "num_experts_per_tok": 4, "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_theta": 150000,
         "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                          "original_max_position_embeddings": 4096, "truncate": False},
         "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False},
    ),
    "gpt-oss-defaults": ("GptOss", {}),
    "gpt-oss-other-sizes": (
        "GptOss",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8, "swiglu_limit": 5.0, "head_dim": 32,
         "layer_types": ["full_attention"] * 5 + ["sliding_attention"], "rope_parameters": {**YARN, "rope_theta": 1e4}},
    ),
    "mixtral": ("Mixtral", {"rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8}),
    "mixtral-window": ("Mixtral", {"sliding_window": 4096}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"rope_theta": 1e6, "head_dim": 24, "num_experts": 16, "decoder_sparse_step": 2, "norm_topk_prob": True,
         "sliding_window": None, "max_window_layers": 6, "mlp_only_layers": [3]},
    ),
    "qwen3-moe-window": ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 8}),
    "qwen3-moe-defaults": ("Qwen3Moe", {}),
}  # fmt: skip


def windows_of(config: Any) -> tuple[int, ...]:
    """How many keys each layer of a transformers config sees, 0 for all."""
    window = config.sliding_window or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


@pytest.mark.parametrize("case", CASES)
def test_a_config_means_what_transformers_reads_in_it(case: str) -> None:
    family, said = CASES[case]
    name = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", family).lower()
    theirs = getattr(importlib.import_module("transformers"), f"{family}Config")(**SIZES, **said)
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rotary = getattr(modeling, f"{family}RotaryEmbedding")(theirs)
    attention = getattr(modeling, f"{family}Attention")(theirs, 0)

    ours = find_family([f"{family}ForCausalLM"], "here").parse_hf({**SIZES, **said})
    windows = ours.windows if hasattr(ours, "windows") else (ours.window,) * ours.layers
    assert windows == windows_of(theirs)
    assert (ours.head_dim, ours.head_dim**-0.5) == (attention.head_dim, attention.scaling)
    assert ours.kv_heads * attention.num_key_value_groups == ours.heads
    assert (ours.max_context, ours.eps, ours.tied) == (
        theirs.max_position_embeddings, theirs.rms_norm_eps, theirs.tie_word_embeddings,
    )  # fmt: skip
    np.testing.assert_allclose(ours.rope.inv_freq(), rotary.inv_freq.numpy(), rtol=1e-6)
    assert ours.rope.cos_sin_factor() == pytest.approx(rotary.attention_scaling, rel=1e-12)
    if family == "GptOss":
        chosen = ours.experts
        assert (chosen.count, chosen.top_k) == (theirs.num_local_experts, theirs.num_experts_per_tok)
        assert (chosen.width, ours.limit) == (theirs.intermediate_size, theirs.swiglu_limit)
    elif hasattr(theirs, "num_local_experts"):
        _same_experts(ours, [getattr(modeling, f"{family}DecoderLayer")(theirs, layer).mlp for layer in range(6)])


def _same_experts(ours: Any, mlps: list[Any]) -> None:
    """A config of ours routes as the MLPs of all layers do."""
    routed = [mlp for mlp in mlps if hasattr(mlp, "experts")]
    assert getattr(ours, "sparse", (True,) * len(mlps)) == tuple(hasattr(mlp, "experts") for mlp in mlps)
    gate, experts = routed[0].gate, routed[0].experts
    assert (ours.experts.count, ours.experts.width) == (experts.num_experts, experts.intermediate_dim)
    assert (ours.experts.top_k, ours.experts.normalize) == (gate.top_k, getattr(gate, "norm_topk_prob", True))
