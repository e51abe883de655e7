"""DeepSeek-V4 as the hub has it, and what its state of sequences is for; test_families.py has the rest of its cases.

The random model makes every one of these show in the logits by a hundred times the tolerance and more: mixing streams
by M and not its transpose (with four streams), Sinkhorn from rows first, post without its 2, no inverse rotation of the
output, no norm of query heads, no sinks, no ape, Ca and Cb exchanged, entries seen one token too early, one theta for
all layers, entries rotated at their window's end, weights of experts taken from biased scores, no clamp.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_families import TOLERANCE, build, decoded_logits, relative_error
from witness import kl_divergence, token_ids
from witness_v4 import RATES, deepseek_v4, save_hub, save_hub_quantized

from tapeout.compiler.models import find_family
from tapeout.compiler.spec import Quantization
from tapeout.runtime import Model, load
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.host import host_targets

# Rows of whole blocks of 32, and nothing to choose: a choice that rounding turns is no error of a kernel.
ROUNDED: dict[str, Any] = {"q_lora_rank": 32, "index_topk": 64, "num_experts_per_tok": 8}


def test_names_of_the_hub_give_the_weights_of_save_pretrained(tmp_path: Path) -> None:
    reference = deepseek_v4(yarn=True)
    ours = build(reference.save_hf(tmp_path / "saved"), tmp_path / "a")
    hub = build(save_hub(reference, tmp_path / "hub"), tmp_path / "b")
    weights = "weights/rank0.safetensors"
    assert (ours / weights).read_bytes() == (hub / weights).read_bytes()
    ignored = json.loads((hub / "plan.json").read_text())["checkpoint"]["ignored"]
    reason = "multi-token prediction is a draft source, not part of the model's own forward pass"
    assert ignored == [{"tensor": "mtp.0.e_proj.weight", "reason": reason}]


def test_the_hubs_number_formats(tmp_path: Path) -> None:
    """FP8 in blocks and four-bit experts, dequantized at compile time, and as they are."""
    reference, ids = deepseek_v4(**ROUNDED, seed=3), token_ids(100)
    held = save_hub_quantized(reference, tmp_path / "hub")
    expected = held.logits(ids)
    with load(build(tmp_path / "hub", tmp_path / "exact", Quantization(activations="f32"))) as model:
        assert relative_error(model.logits(ids), expected) <= TOLERANCE
    with load(build(tmp_path / "hub", tmp_path / "kept")) as model:
        formats = {weight["format"] for weight in model.plan["weights"]}
        assert {"fp8_block128", "mxfp4", "bf16", "f32"} <= formats
        assert kl_divergence(expected, model.logits(ids)).mean() <= 2e-3


def step(model: Model, sequences: list[Any], tokens: list[int]) -> np.ndarray:
    """One decode step of several sequences; their logits."""
    model.decode(sequences, tokens)
    head = model.bucket("head", len(tokens))
    address = model.backend.logits_address(head)
    return np.array((ctypes.c_float * (len(tokens) * model.vocab_size)).from_address(address), np.float32).reshape(
        len(tokens), -1
    )


def test_sequences_keep_their_own_windows(tmp_path: Path) -> None:
    """Two sequences of different lengths, decoded together and then with a third in the first one's slot."""
    reference = deepseek_v4()
    texts = [token_ids(60, seed=seed) for seed in (3, 4, 5)]
    expected = [reference.logits(ids) for ids in texts]
    with load(build(reference.save_hf(tmp_path / "hf"), tmp_path / "artifact")) as model:
        first, second = model.pool.open(), model.pool.open()
        model.prefill(first, texts[0][:37])
        model.prefill(second, texts[1][:9])
        for i in range(20):
            rows = step(model, [first, second], [texts[0][37 + i], texts[1][9 + i]])
            assert relative_error(rows, np.stack([expected[0][37 + i], expected[1][9 + i]])) <= TOLERANCE
        with pytest.raises(TapeoutError) as caught:
            model.prefill(model.pool.open(), texts[2][:1])
        assert str(caught.value) == (
            "all 2 places for the state of a sequence are taken; close a sequence, or compile with a larger "
            "serving.max_sequences"
        )
        model.pool.close(first)
        third = model.pool.open()
        for i in range(15):
            rows = step(model, [second, third], [texts[1][29 + i], texts[2][i]])
            assert relative_error(rows, np.stack([expected[1][29 + i], expected[2][i]])) <= TOLERANCE


def test_a_cache_of_float16_and_quantized_weights_stay_close(tmp_path: Path) -> None:
    reference, ids = deepseek_v4(**ROUNDED), token_ids(100)
    source = reference.save_hf(tmp_path / "hf")
    artifact = build(source, tmp_path / "artifact", Quantization(default="q8_0"), kv="f16")
    with load(artifact, threads=2) as model:
        kept = [d for d in model.plan["decisions"] if "residual streams" in d["reason"]]
        assert {d["choice"] for d in kept} == {"f32"}
        both = (model.logits(ids), decoded_logits(model, ids))
        assert max(kl_divergence(reference.logits(ids), logits).mean() for logits in both) <= 2e-3
        for target in host_targets():
            with load(artifact, threads=1, target=target) as one, load(artifact, threads=3, target=target) as three:
                assert np.array_equal(one.logits(ids), three.logits(ids))


LAYER = "model.layers.1"
TOO_LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "streams": ({"hc_mult": 9}, "model.layers.0.attn_hc.weights: 9 residual streams; the CPU kernels mix at most 8"),
    "heads": (
        {"head_dim": 40, "partial_rotary_factor": 0.2},
        "model.layers.0.self_attn.attention: heads of 40 channels; the CPU kernel takes a multiple of 16, at most "
        "1024, and all heads of a row side by side",
    ),
    "windows": (
        {"compress_rates": {**RATES, "compressed_sparse_attention": 300}},
        f"{LAYER}.self_attn.compressor.entries: entries of 32 channels from 600 rows; the CPU kernel makes entries of "
        "a multiple of 16 channels, at most 1024, from at most 512 rows",
    ),
    "index heads": (
        {"index_n_heads": 129},
        f"{LAYER}.self_attn.compressor.indexer.selection: 129 index heads of 16 channels that select 4 entries; the "
        "CPU kernel takes at most 128 heads of 256 channels and 4096 entries",
    ),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_what_no_kernel_holds_is_refused(case: str, tmp_path: Path) -> None:
    sizes, sentence = TOO_LARGE[case]
    source = deepseek_v4(**sizes).save_hf(tmp_path / "hf")
    with pytest.raises(TapeoutError) as caught:
        build(source, tmp_path / "artifact")
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("wrong", "said"), [(8, "8"), (-1, "-1")])
def test_a_table_that_names_no_expert_is_refused(wrong: int, said: str, tmp_path: Path) -> None:
    reference = deepseek_v4()
    reference.model.model.layers[0].mlp.gate.tid2eid[7, 1] = wrong
    source = reference.save_hf(tmp_path / "hf")
    with pytest.raises(TapeoutError) as caught:
        build(source, tmp_path / "artifact")
    assert str(caught.value) == (
        f"{source}/model.safetensors: tensor 'model.layers.0.ffn.gate.tid2eid' holds {said} in row 7; its numbers must "
        "lie from 0 to 7"
    )


FLASH: dict[str, Any] = {
    "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "vocab_size": 129280,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "num_hash_layers": 3, "rope_theta": 10000, "compress_rope_theta": 160000, "max_position_embeddings": 1048576,
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
    "num_nextn_predict_layers": 1, "sliding_window": 128, "swiglu_limit": 10.0, "expert_dtype": "fp4",
}  # fmt: skip
NESTED = {
    "main": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.125},
    "compress": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4, "partial_rotary_factor": 0.125},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "of the hub": FLASH,
    "defaults": {},
    "other rates": {"num_hidden_layers": 5, "compress_rate_csa": 8, "compress_rates": None, "compress_rate_hca": 64},
    "kinds of layers": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "compressed_sparse_attention"],
                        "mlp_layer_types": ["moe", "hash_moe"]},
    "rope by kind": {"rope_parameters": NESTED},
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_means_what_transformers_reads_in_it(case: str) -> None:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    ours = find_family(["DeepseekV4ForCausalLM"], "here").parse_hf(CONFIGS[case])
    theirs = DeepseekV4Config(**CONFIGS[case])
    rates = {"sliding_attention": 0, **theirs.compress_rates}
    assert [kind.ratio for kind in ours.kinds] == [rates[kind] for kind in theirs.layer_types]
    assert [kind.sparse for kind in ours.kinds] == ["sparse" in kind for kind in theirs.layer_types]
    assert [kind.by_token for kind in ours.kinds] == [kind == "hash_moe" for kind in theirs.mlp_layer_types]
    names = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
             "head_dim": "head_dim", "ffn": "moe_intermediate_size", "eps": "rms_norm_eps", "window": "sliding_window",
             "max_context": "max_position_embeddings", "tied": "tie_word_embeddings", "limit": "swiglu_limit",
             "q_rank": "q_lora_rank", "o_groups": "o_groups", "o_rank": "o_lora_rank", "index_heads": "index_n_heads",
             "index_dim": "index_head_dim", "index_top_k": "index_topk", "streams": "hc_mult",
             "iterations": "hc_sinkhorn_iters", "streams_eps": "hc_eps", "vocab_size": "vocab_size"}  # fmt: skip
    assert {key: getattr(ours, key) for key in names} == {key: getattr(theirs, name) for key, name in names.items()}
    chosen = ours.experts
    assert (chosen.count, chosen.top_k) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
    assert chosen.scale == theirs.routed_scaling_factor
    rotary = DeepseekV4RotaryEmbedding(theirs)
    for rope, kind in ((ours.rope, "main"), (ours.compress_rope, "compress")):
        np.testing.assert_allclose(rope.inv_freq(), getattr(rotary, f"{kind}_inv_freq").numpy(), rtol=1e-6)
        assert rope.cos_sin_factor() == getattr(rotary, f"{kind}_attention_scaling")
