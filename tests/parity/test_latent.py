"""Latent attention beyond the rows of test_families.py: quantized weights, hub configs, what is left out and why."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import packed
import pytest
import torch
import witness_latent
from test_families import TOLERANCE, build, decoded_logits, relative_error
from witness import kl_divergence, token_ids

from tapeout.compiler.models import find_family
from tapeout.compiler.models.latent_config import LatentConfig
from tapeout.compiler.recipes_table import NestedRecipes
from tapeout.compiler.spec import Quantization
from tapeout.runtime import load
from tapeout.runtime.host import host_targets

# whole blocks of 32 in every row
WIDE = {"q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
FLOAT = {"*ffn_gate_inp*": "F32"}


@pytest.mark.parametrize("whole", [False, True])
def test_a_quantized_gguf_follows_the_dequantized_reference(whole: bool, tmp_path: Path) -> None:
    """Halves of kv_b_proj in formats of their own; before they were split, keys are dequantized to be transposed."""
    reference, ids = witness_latent.deepseek_v2(whole=whole, **WIDE), token_ids(80)
    formats = {**FLOAT, "*attn_k_b*": "Q5_0", "*attn_v_b*": "Q4_1", "*attn_q_a.*": "Q4_0", "*": "Q8_0"}
    held = reference.write_gguf(tmp_path / "model.gguf", formats)
    with load(build(tmp_path / "model.gguf", tmp_path / "artifact", kv="f16")) as model:
        both = (model.logits(ids), decoded_logits(model, ids))
        assert max(kl_divergence(held.logits(ids), logits).mean() for logits in both) <= 5e-3
        kinds = {
            w["name"]: w["format"] for w in model.plan["weights"] if w["name"].startswith("model.layers.1.self_attn")
        }
    at = "model.layers.1.self_attn"
    assert (kinds[f"{at}.k_b_proj"], kinds[f"{at}.v_b_proj"]) == (("f32", "q8_0") if whole else ("q5_0", "q4_1"))
    with load(build(tmp_path / "model.gguf", tmp_path / "exact", Quantization(activations="f32"))) as model:
        assert relative_error(model.logits(ids), held.logits(ids)) <= TOLERANCE


def test_a_quantized_index_selects_what_the_dequantized_reference_does(tmp_path: Path) -> None:
    reference, ids = witness_latent.glm_dsa(**WIDE, index_head_dim=32), token_ids(80)
    held = reference.write_gguf(tmp_path / "model.gguf", {**FLOAT, "*": "Q8_0"})
    with load(build(tmp_path / "model.gguf", tmp_path / "exact", Quantization(activations="f32"))) as model:
        assert relative_error(model.logits(ids), held.logits(ids)) <= TOLERANCE


# heads of kv_b_proj that fall on the blocks of its scales, and heads that cut through them (GLM-5: 192 and 256)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
HEADS: dict[str, tuple[dict[str, int], str]] = {
    "on blocks": ({"qk_nope_head_dim": 128, "v_head_dim": 128}, "fp8_block128"),
    "through blocks": ({"qk_nope_head_dim": 96, "v_head_dim": 64}, "f32"),
}


@pytest.mark.parametrize("case", HEADS)
def test_fp8_blocks_of_kv_b(case: str, tmp_path: Path) -> None:
    """What must be transposed, or has rows of two heads under one scale, becomes float32, which changes no value."""
    sizes, values = HEADS[case]
    reference = witness_latent.deepseek_v3(
        **sizes, hidden_size=128, intermediate_size=128, q_lora_rank=128, kv_lora_rank=128, num_attention_heads=2,
        num_key_value_heads=2, num_hidden_layers=2, first_k_dense_replace=2,
    )  # fmt: skip
    pack, ids = packed.fp8_packer(True, torch.float32, "weight_scale_inv"), token_ids(60)
    held = packed.write_model(reference, tmp_path / "hf", FP8, pack)
    with load(build(tmp_path / "hf", tmp_path / "artifact", Quantization(activations="f32"))) as model:
        nested = NestedRecipes(model.plan)
        found = {w["name"]: json.dumps(nested.of(w)) for w in model.plan["weights"]}
        assert relative_error(model.logits(ids), held.logits(ids)) <= TOLERANCE
    assert '"to": "f32"' in found["model.layers.0.self_attn.k_b_proj"]
    assert f'"{values}"' in found["model.layers.0.self_attn.v_b_proj"]


def test_layers_that_draft_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    reference = witness_latent.deepseek_v3(drafts=True)
    for number, source in enumerate((reference.save_hf(tmp_path / "hf"), tmp_path / "model.gguf")):
        if number:
            reference.write_gguf(source)
        plan = json.loads((build(source, tmp_path / str(number)) / "plan.json").read_text())
        reasons = {item["tensor"]: item["reason"] for item in plan["checkpoint"]["ignored"]}
        assert len(reasons) == 3 and all("drafts further tokens" in reason for reason in reasons.values())
        assert all(".3." in tensor for tensor in reasons)
        assert plan["model"]["config"]["num_nextn_predict_layers"] == 1


def test_both_forms_of_kv_b_give_the_same_logits(tmp_path: Path) -> None:
    ids, logits = token_ids(60), list[np.ndarray]()
    for whole in (False, True):
        path = tmp_path / f"{whole}.gguf"
        witness_latent.deepseek_v2(whole=whole).write_gguf(path)
        with load(build(path, tmp_path / str(whole))) as model:
            logits.append(model.logits(ids))
    assert np.array_equal(*logits)


@pytest.mark.parametrize("target", ["x86_64_v3", "x86_64_v4"])
def test_results_do_not_depend_on_threads(target: str, tmp_path: Path) -> None:
    """In steps of many rows, and token by token behind 128 keys, where attention is split over them."""
    if target not in host_targets():
        pytest.skip(f"this CPU does not run {target}")
    ids = token_ids(170)
    for name, reference in (("v3", witness_latent.deepseek_v3()), ("glm", witness_latent.glm_dsa())):
        artifact, logits = build(reference.save_hf(tmp_path / f"{name}-hf"), tmp_path / name), list[np.ndarray]()
        for threads in (1, 3):
            with load(artifact, threads=threads, target=target) as model:
                logits += [np.concatenate([model.logits(ids), decoded_logits(model, ids, 140)])]
        np.testing.assert_array_equal(logits[0], logits[1])


# Configs as on the hub: the class of transformers, and what config.json says that tells models apart
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"}  # fmt: skip
NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "moe_layer_freq": 1}
HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": (
        "DeepseekV2",
        {"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
         "q_lora_rank": None, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 64, "n_group": 1,
         "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "num_experts_per_tok": 6,
         "norm_topk_prob": False, "max_position_embeddings": 163840,
         "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**NOAUX, "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_group": 8,
         "topk_group": 4, "max_position_embeddings": 163840, "rope_scaling": YARN, "num_nextn_predict_layers": 1},
    ),
    "kimi-k2": (
        "DeepseekV3",
        {**NOAUX, "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
         "num_key_value_heads": 64, "first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
         "routed_scaling_factor": 2.827, "rope_theta": 50000.0, "max_position_embeddings": 131072,
         "num_nextn_predict_layers": 0, "rope_scaling": {**YARN, "factor": 32.0}},
    ),
    "deepseek-v3.2": (
        "DeepseekV32",
        {**NOAUX, "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 3, "rope_scaling": YARN,
         "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "num_nextn_predict_layers": 1},
    ),
    "glm-5": (
        "GlmMoeDsa",
        {**NOAUX, "num_hidden_layers": 78, "indexer_rope_interleave": True, "rope_interleave": True,
         "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "num_nextn_predict_layers": 1},
    ),
    "glm-5-shared-selections": ("GlmMoeDsa", {**NOAUX, "index_topk_freq": 4, "index_skip_topk_offset": 3}),
    "glm-5-pattern": ("GlmMoeDsa", {**NOAUX, "num_hidden_layers": 4, "index_topk_pattern": "FSFS"}),
}  # fmt: skip


@pytest.mark.parametrize("case", HUB)
def test_a_config_means_what_transformers_reads_in_it(case: str) -> None:
    family, said = HUB[case]
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 12}
    said = {"vocab_size": 1000, "intermediate_size": 96, **sizes, **said}
    transformers = importlib.import_module("transformers")
    theirs = getattr(transformers, f"{family}Config")(**said)
    modeling = importlib.import_module(getattr(transformers, f"{family}ForCausalLM").__module__)
    rotary = getattr(modeling, f"{family}RotaryEmbedding")(theirs)
    with torch.device("meta"):
        attention = getattr(modeling, f"{family}Attention")(theirs, 0)
    name = f"{family}ForCausalLM"
    ours: LatentConfig = find_family([name], "here").parse_hf({"architectures": [name], **said})
    assert ours.scale == pytest.approx(attention.scaling, rel=1e-12)
    np.testing.assert_allclose(ours.rope.inv_freq(), rotary.inv_freq.numpy(), rtol=1e-6)
    assert ours.rope.cos_sin_factor() == pytest.approx(rotary.attention_scaling, rel=1e-12)
    widths = (theirs.q_lora_rank or 0, theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
    assert (ours.q_rank, ours.latent, ours.nope, ours.rotated) == widths
    assert (ours.value, ours.eps) == (theirs.v_head_dim, theirs.rms_norm_eps)
    assert ours.sparse == tuple(layer >= theirs.first_k_dense_replace for layer in range(ours.layers))
    _check_experts(ours, theirs)
    if ours.index is not None:
        kinds = getattr(theirs, "indexer_types", ["full"] * ours.layers)
        assert ours.index.full == tuple(kind == "full" for kind in kinds)
        sizes = (theirs.index_n_heads, theirs.index_head_dim, theirs.index_topk)
        assert (ours.index.heads, ours.index.head_dim, ours.index.top_k) == sizes


def _check_experts(ours: LatentConfig, theirs: Any) -> None:
    assert ours.experts is not None
    sizes = (theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size)
    assert (ours.experts.count, ours.experts.top_k, ours.experts.width) == sizes
    assert ours.experts.scale == theirs.routed_scaling_factor
    assert ours.shared == theirs.n_shared_experts * theirs.moe_intermediate_size
    groups: Mapping[str, int] = {"n_group": theirs.n_group, "topk_group": theirs.topk_group}
    assert (ours.experts.groups, ours.experts.top_groups) == tuple(groups.values())
