"""The deployments that specs plan from a configuration alone, against transformers' configurations and models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import load_spec

SPECS = Path(__file__).parents[2] / "specs"
NAMES = {
    "Kimi-K2.5": ("kimi-k2.5-int4-8x", "DeepseekV3"),
    "GLM-5": ("glm-5-gguf-8x", "GlmMoeDsa"),
    "DeepSeek-V4-Flash": ("deepseek-v4-flash-nvfp4-4x", "DeepseekV4"),
}
# what the specs' comments say of each: keys that the defaults do not have, or have otherwise
OWN = {
    "Kimi-K2.5": {"num_attention_heads", "num_key_value_heads", "n_routed_experts", "n_group", "topk_group",
                  "first_k_dense_replace", "routed_scaling_factor", "vocab_size", "max_position_embeddings",
                  "rope_theta", "rope_scaling"},
    "GLM-5": set[str](),
    "DeepSeek-V4-Flash": {"num_hash_layers", "compress_ratios"},
}  # fmt: skip
BUFFERS = ("tid2eid", "e_score_correction_bias")  # what transformers keeps as buffers and checkpoints hold


def written(name: str) -> dict[str, Any]:
    """The keys of a spec's configuration, those of the text part of a multimodal one."""
    config = load_spec(SPECS / f"{NAMES[name][0]}-rtx-pro-6000.yaml").model.config
    assert config is not None
    config = dict(config.get("text_config", config))
    config.pop("architectures", None)
    return config


def reference(name: str, **keys: Any) -> Any:
    return getattr(transformers, f"{NAMES[name][1]}Config")(**keys)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_the_defaults_but_for_those_that_the_spec_names(name: str) -> None:
    defaults, keys = reference(name), written(name)
    assert {key for key, value in keys.items() if getattr(defaults, key, None) != value} == OWN[name]


def test_kimi_says_what_kind_of_model_it_is() -> None:
    config: Any = transformers.Kimi_K25Config()
    assert type(config.text_config) is type(reference("Kimi-K2.5"))
    keys = written("Kimi-K2.5")
    assert config.image_token_id < keys["vocab_size"] == 160 * 1024
    scaling = keys["rope_scaling"]
    assert scaling["factor"] * scaling["original_max_position_embeddings"] == keys["max_position_embeddings"]


def test_deepseek_v4_has_the_layers_of_the_default() -> None:
    defaults, keys = reference("DeepSeek-V4-Flash"), written("DeepSeek-V4-Flash")
    assert keys["compress_ratios"] == [defaults.compress_rates[kind] for kind in defaults.layer_types]
    by_token = [kind == "hash_moe" for kind in defaults.mlp_layer_types]
    assert by_token == [layer < keys["num_hash_layers"] for layer in range(keys["num_hidden_layers"])]
    ropes = defaults.rope_parameters
    assert (ropes["main"]["rope_theta"], ropes["compress"]["rope_theta"]) == (1e4, 16e4)
    assert (keys["rope_theta"], keys["compress_rope_theta"]) == (1e4, 16e4)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_model_in_transformers(name: str, tmp_path: Path) -> None:
    keys = written(name)
    with torch.device("meta"):
        model = getattr(transformers, f"{NAMES[name][1]}ForCausalLM")(reference(name, **keys))
    buffers: Mapping[str, torch.Tensor] = dict(model.named_buffers())
    kept = [value for key, value in buffers.items() if key.rpartition(".")[2] in BUFFERS]
    expected = sum(value.numel() for value in [*model.parameters(), *kept])
    spec = load_spec(SPECS / f"{NAMES[name][0]}-rtx-pro-6000.yaml")
    assert compile_spec(spec, tmp_path / "plan.json", plan_only=True)["model"]["parameters"] == expected
