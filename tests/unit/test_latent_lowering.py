"""Latent attention as launches: what is cached, what is a view, and shapes that the CPU kernels do not serve."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tiny

from tapeout.compiler.spec import Quantization, Serving
from tapeout.compiler.stages import SelectedModel
from tapeout.runtime.errors import TapeoutError

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2,
    "max_position_embeddings": 256, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 4,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a dense model with an index in every layer."""
    hidden, heads, ffn, q_rank, latent = (
        config[key]
        for key in ("hidden_size", "num_attention_heads", "intermediate_size", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    index = config["index_head_dim"]
    found = {name: (config["vocab_size"], hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn), "self_attn.q_a_proj": (q_rank, hidden),
        "self_attn.q_a_layernorm": (q_rank,), "self_attn.q_b_proj": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden), "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (heads * (nope + value), latent), "self_attn.o_proj": (hidden, heads * value),
        "self_attn.indexer.wq_b": (config["index_n_heads"] * index, q_rank), "self_attn.indexer.wk": (index, hidden),
        "self_attn.indexer.k_norm": (index,), "self_attn.indexer.weights_proj": (config["index_n_heads"], hidden),
    }  # fmt: skip
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        found |= {f"{at}.{name}.weight": shape for name, shape in layer.items()}
        found[f"{at}.self_attn.indexer.k_norm.bias"] = (index,)
    return {**found, "model.norm.weight": (hidden,)}


def lowered(quantization: Quantization | None = None, **change: Any) -> SelectedModel:
    config = {**CONFIG, **change}
    return tiny.compile_tiny(tiny.checkpoint(shapes(config), config), quantization).get(SelectedModel)


def test_a_layer_caches_one_key_a_token_and_one_of_its_index() -> None:
    selected = lowered()
    sizes = {cache.name: cache.page_bytes // Serving().page_tokens for cache in selected.caches}
    assert sizes == {"layer.0": 2 * 40, "layer.0.index": 2 * 16, "layer.1": 2 * 40, "layer.1.index": 2 * 16}


def test_queries_and_keys_are_rotated_where_they_lie() -> None:
    """Views need no launch; the one copy brings the unrotated part of every head together for its product."""
    (program, *_) = (item for item in lowered().programs if item.phase == "decode")
    kernels = [launch.kernel for launch in program.launches if launch.op.startswith("model.layers.0.self_attn")]
    assert kernels.count("rotate") == 4 and kernels.count("gather_columns") == 1
    assert [name for name in kernels if "kv" in name] == ["index_kv_f16", "latent_kv_f16"]


def test_the_default_leaves_the_weights_of_index_heads_alone() -> None:
    """As transformers and llama.cpp keep them; the other matrices of the index follow the default."""
    wide = {"q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    selected = lowered(Quantization(default="q8_0"), **wide)
    at = "model.layers.0.self_attn.indexer"
    formats = {weight.name: weight.recipe.format for weight in selected.weights}
    assert (formats[f"{at}.weights_proj"], formats[f"{at}.wk"], formats[f"{at}.wq_b"]) == ("bf16", "q8_0", "q8_0")


REFUSED: dict[str, tuple[dict[str, int], str]] = {
    "a latent that is not whole tiles": (
        {"kv_lora_rank": 40},
        "model.layers.0.self_attn.k_b_proj: heads of 16 to 40 channels; the CPU kernel for bf16 needs outputs in "
        "multiples of 16",
    ),
    "a wide key": (
        {"kv_lora_rank": 544},
        "model.layers.0.self_attn.attention: keys of 544 latent and 8 rope channels; the CPU kernel takes multiples "
        "of 8, at most 512 latent and 576 together",
    ),
    "many keys": (
        {"index_topk": 5000},
        "model.layers.0.self_attn.indexer.select: 4 index heads of 16 channels that select 5000 keys; the CPU kernel "
        "takes at most 128 heads, 16384 channels in all, 4096 keys",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shapes_that_no_kernel_serves_are_refused(case: str) -> None:
    change, sentence = REFUSED[case]
    with pytest.raises(TapeoutError, match=f"^{re.escape(sentence)}$"):
        lowered(**change)


def test_the_latents_of_q_and_of_keys_are_joined_in_declared_order() -> None:
    """By name, whatever comes first in the file: there it is the keys' (vllm#41057)."""
    names = list(shapes(CONFIG))
    at = "model.layers.0.self_attn"
    assert sorted(names).index(f"{at}.kv_a_proj_with_mqa.weight") < sorted(names).index(f"{at}.q_a_proj.weight")
    weights = {weight.name: weight.recipe for weight in lowered().weights}
    read = [part.tensor for part in weights[f"{at}.q_a_kv_a_proj_with_mqa_proj"].reads()]
    assert read == [f"{at}.q_a_proj.weight", f"{at}.kv_a_proj_with_mqa.weight"]


BROKEN: dict[str, tuple[dict[str, tuple[int, ...] | None], str]] = {
    "a layer without its index": (
        {"model.layers.1.self_attn.indexer.wk.weight": None},
        "tensor model.layers.1.self_attn.indexer.wk.weight is missing; the family deepseek_v32 needs it with shape "
        "[16, 64]",
    ),
    "a head too few": (
        {"model.layers.0.self_attn.kv_b_proj.weight": (96, 32)},
        "tensor model.layers.0.self_attn.kv_b_proj.weight has shape [96, 32], but the config says",
    ),
    "a layer behind the last that the config does not know": (
        {"model.layers.2.eh_proj.weight": (64, 128)},
        "tensor model.layers.2.eh_proj.weight is not part of the family deepseek_v32; every",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_contradict_the_config_are_refused(case: str) -> None:
    change, sentence = BROKEN[case]
    tensors = {name: shape for name, shape in {**shapes(CONFIG), **change}.items() if shape is not None}
    with pytest.raises(TapeoutError, match=re.escape(sentence)):
        tiny.compile_tiny(tiny.checkpoint(tensors, CONFIG))
