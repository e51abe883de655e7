"""What a family's config may not say: whatever changes the mathematics and is not computed ends in one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import tiny

from tapeout.compiler.models import FAMILIES, find_family
from tapeout.compiler.models.base import Fields
from tapeout.runtime.errors import TapeoutError

CONFIG: Mapping[str, Any] = {**tiny.CONFIG, "num_hidden_layers": 3}
SHAPES = {"token_embd.weight": (128, 64), "output.weight": (128, 64)}
UNSUPPORTED = "which changes the mathematics and is not supported for this family"
HF = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROUTED_HF = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
GGUF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# what every family of Llama's shape refuses in config.json
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "soft-capped attention": ({"attn_logit_softcapping": 50.0}, f"sets attn_logit_softcapping = 50.0, {UNSUPPORTED}"),
    "soft-capped logits": ({"final_logit_softcapping": 30.0}, f"sets final_logit_softcapping = 30.0, {UNSUPPORTED}"),
    "attention in chunks": ({"attention_chunk_size": 8192}, f"sets attention_chunk_size = 8192, {UNSUPPORTED}"),
    "dual chunk attention": (
        {"dual_chunk_attention_config": {"chunk_size": 262144}},
        f"sets dual_chunk_attention_config = {{'chunk_size': 262144}}, {UNSUPPORTED}",
    ),
    "multimodal rotation": ({"use_mrope": True}, f"sets use_mrope = True, {UNSUPPORTED}"),
    "two-sided attention": ({"is_causal": False}, f"sets is_causal = False, {UNSUPPORTED}"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, f"sets partial_rotary_factor = 0.5, {UNSUPPORTED}"),
    "partial rotation within rope_parameters": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        f": rope scaling sets partial_rotary_factor = 0.5, {UNSUPPORTED}",
    ),
    "another activation": ({"hidden_act": "gelu"}, ": hidden_act is 'gelu'; it must be one of silu"),
    "dynamic rope": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        ": rope scaling type 'dynamic' is unknown; known are default, linear, llama3, yarn",
    ),
    "longrope": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        ": rope scaling type 'longrope' is unknown; known are default, linear, llama3, yarn",
    ),
    "rope sections": (
        {"rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [16, 24, 24]}},
        f": rope scaling sets mrope_section = [16, 24, 24], {UNSUPPORTED}",
    ),
    "rope by kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        f": rope scaling sets full_attention = {{'rope_theta': 1000000.0}}, {UNSUPPORTED}",
    ),
    "yarn without a factor": (
        {"rope_scaling": {"type": "yarn"}},
        ": rope scaling: factor is missing; it must be a finite number",
    ),
}
QWEN: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown kind of layer": (
        {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        ": layer_types must list 3 times one of full_attention, sliding_attention",
    ),
    "too few kinds of layers": (
        {"layer_types": ["full_attention"]},
        ": layer_types must list 3 times one of full_attention, sliding_attention",
    ),
    "sliding layers without a window": (
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8},
        ": layer_types has sliding layers, but there is no window; it must be stated by sliding_window, and "
        "use_sliding_window must be true",
    ),
    "a window for each layer": (
        {"use_sliding_window": True, "sliding_window": [8, 8, 8]},
        ": sliding_window is [8, 8, 8]; it must be a positive integer",
    ),
    "a negative first layer": (
        {"use_sliding_window": True, "max_window_layers": -1},
        ": max_window_layers is -1; it must be 0 or a positive integer",
    ),
}
MISTRAL: dict[str, tuple[dict[str, Any], str]] = {
    "kinds of layers": (
        {"layer_types": ["full_attention"] * 3},
        f"sets layer_types = ['full_attention', 'full_attention', 'full_attention'], {UNSUPPORTED}",
    ),
    "a window for each layer": (
        {"sliding_window": [None, 8, 8]},
        ": sliding_window is [None, 8, 8]; it must be a positive integer",
    ),
    "a window that is not used": (
        {"use_sliding_window": False, "sliding_window": 8},
        f"sets use_sliding_window = False, {UNSUPPORTED}",
    ),
}
# what families with experts refuse, from the same config
EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "more choices than experts": (
        {"num_local_experts": 4, "num_experts_per_tok": 5},
        ": 5 of 4 experts are to be chosen; there must be at least as many, and at most 4096",
    ),
    "too many experts": (
        {"num_local_experts": 5000},
        " of 5000 experts are to be chosen; there must be at least as many, and at most 4096",
    ),
    "no experts": ({"num_local_experts": 0}, ": num_local_experts is 0; it must be a positive integer"),
    "two numbers of experts": (
        {"num_experts": 8, "num_local_experts": 4},
        ": num_experts and num_local_experts differ",
    ),
    "another activation": SETTINGS["another activation"],
    "kinds of layers": MISTRAL["kinds of layers"],
}
QWEN3_MOE: dict[str, tuple[dict[str, Any], str]] = {
    "dense layers beyond the last": (
        {"mlp_only_layers": [0, 3]},
        ": mlp_only_layers is [0, 3]; it must list layers below 3",
    ),
    "no sparse step": ({"decoder_sparse_step": 0}, ": decoder_sparse_step is 0; it must be a positive integer"),
    "scaled weights": ({"routed_scaling_factor": 2.5}, f"sets routed_scaling_factor = 2.5, {UNSUPPORTED}"),
    "groups of experts": ({"n_group": 4}, f"sets n_group = 4, {UNSUPPORTED}"),
}
OWN = {"mistral": MISTRAL, "qwen2": QWEN, "qwen3": QWEN, "qwen3_moe": QWEN3_MOE}
CONFIG_CASES = [(name, case) for name in HF for case in (*SETTINGS, *OWN.get(name, {}))]

METADATA: dict[str, tuple[Any, str]] = {
    "final_logit_softcapping": (30.0, f"sets A.final_logit_softcapping = 30.0, {UNSUPPORTED}"),
    "attention.scale": (0.5, f"sets A.attention.scale = 0.5, {UNSUPPORTED}"),
    "attention.causal": (False, f"sets A.attention.causal = False, {UNSUPPORTED}"),
    "attention.temperature_scale": (0.1, f"sets A.attention.temperature_scale = 0.1, {UNSUPPORTED}"),
    "rope.scaling.type": ("longrope", ": rope scaling type 'longrope' is unknown; known are none, linear, yarn"),
    "rope.dimension_count": (
        8,
        ": A.rope.dimension_count differs from the head size 16; partial rotation is not supported for this family",
    ),
    "attention.value_length": (8, ": key and value heads differ in size, which the family A does not have"),
}
QWEN_METADATA: dict[str, tuple[Any, str]] = {
    "expert_count": (8, f"sets A.expert_count = 8, {UNSUPPORTED}"),
    "attention.sliding_window": (
        8,
        ": A.attention.sliding_window is 8, but which layers slide is not known; A.attention.sliding_window_pattern "
        "must be a period or list true or false for 3 layers",
    ),
}
LLAMA_METADATA: dict[str, tuple[Any, str]] = {
    "expert_count": (8, ": A.expert_used_count is missing; it must be a positive integer"),
    "attention.sliding_window_pattern": (2, f"sets A.attention.sliding_window_pattern = 2, {UNSUPPORTED}"),
    "attention.sliding_window": (-1, ": A.attention.sliding_window is -1; it must be 0 or a positive integer"),
}
OWN_METADATA = {"llama": LLAMA_METADATA, "qwen2": QWEN_METADATA, "qwen3": QWEN_METADATA}
METADATA_CASES = [(name, key) for name in GGUF for key in (*METADATA, *OWN_METADATA.get(name, {}))]


def metadata(arch: str, **more: Any) -> dict[str, Any]:
    """GGUF metadata of CONFIG."""
    keys = {"embedding_length": 64, "block_count": 3, "feed_forward_length": 96, "context_length": 256,
            "attention.head_count": 4, "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    return {f"{arch}.{key}": value for key, value in {**keys, **more}.items()}


@pytest.mark.parametrize(("family", "case"), CONFIG_CASES)
def test_a_config_that_changes_the_mathematics_is_refused(family: str, case: str) -> None:
    change, sentence = (SETTINGS | OWN.get(family, {}))[case]
    parse = find_family([HF[family]], "here").parse_hf
    parse(CONFIG)
    with pytest.raises(TapeoutError, match=f"^config\\.json ?{re.escape(sentence.lstrip())}$"):
        parse({**CONFIG, **change})


@pytest.mark.parametrize(("family", "key"), METADATA_CASES)
def test_metadata_that_changes_the_mathematics_are_refused(family: str, key: str) -> None:
    value, sentence = (METADATA | OWN_METADATA.get(family, {}))[key]
    parse = find_family([GGUF[family]], "here").parse_gguf
    parse(metadata(GGUF[family]), SHAPES)
    sentence = sentence.replace("A.", f"{GGUF[family]}.").replace("family A", f"family {GGUF[family]}")
    with pytest.raises(TapeoutError, match=f"^GGUF metadata ?{re.escape(sentence.lstrip())}$"):
        parse(metadata(GGUF[family], **{key: value}), SHAPES)


@pytest.mark.parametrize(
    ("family", "case"), [(family, case) for family in ROUTED_HF for case in (*EXPERTS, *OWN.get(family, {}))]
)
def test_experts_that_cannot_be_chosen_so_are_refused(family: str, case: str) -> None:
    change, sentence = (EXPERTS | OWN.get(family, {}))[case]
    parse = find_family([ROUTED_HF[family]], "here").parse_hf
    parse(CONFIG)
    with pytest.raises(TapeoutError, match=f"^config\\.json.*{re.escape(sentence.lstrip())}$"):
        parse({**CONFIG, **change})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_shared_count", 1),
        ("expert_weights_scale", 2.5),
        ("expert_gating_func", 2),
        ("expert_weights_norm", False),
    ],
)
@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_metadata_of_another_way_to_route_are_refused(arch: str, key: str, value: object) -> None:
    routed = {"expert_count": 8, "expert_used_count": 2}
    parse = find_family([arch], "here").parse_gguf
    assert parse(metadata(arch, **routed), SHAPES).experts.normalize
    assert parse(metadata(arch, **routed, expert_weights_scale=1.0), SHAPES).experts.scale == 1
    with pytest.raises(TapeoutError, match=f"sets {arch}.{key} = {value!r}, {UNSUPPORTED}"):
        parse(metadata(arch, **routed, **{key: value}), SHAPES)


ROUTED: Mapping[str, Any] = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "num_local_experts": 4,
                             "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # fmt: skip


def routed_shapes(experts: int = 4, width: int = 32) -> dict[str, tuple[int, ...]]:
    """Tensors of ROUTED, which a change of the arguments makes those of another model."""
    dense = tiny.shapes({**ROUTED, "architectures": ["Qwen3ForCausalLM"]})
    found = {name: shape for name, shape in dense.items() if ".mlp." not in name}
    for layer in range(3):
        at = f"model.layers.{layer}.mlp"
        found[f"{at}.gate.weight"] = (experts, 64)
        for expert in range(experts):
            found |= {f"{at}.experts.{expert}.{part}_proj.weight": (width, 64) for part in ("gate", "up")}
            found[f"{at}.experts.{expert}.down_proj.weight"] = (64, width)
    return found


def test_experts_of_another_number_shape_or_format_are_refused() -> None:
    """An expert that is not there, one too many, and one that is unlike the others."""
    sound, up = routed_shapes(), "model.layers.1.mlp.experts.2.up_proj.weight"
    tiny.compile_tiny(tiny.checkpoint(sound, ROUTED))
    cut = {name: shape for name, shape in sound.items() if name != up}
    parts = "the parts of model.layers.1.mlp.experts.up_proj share both"
    first = "model.layers.1.mlp.experts.0.up_proj.weight is [32, 64] bf16"
    cases: list[tuple[dict[str, tuple[int, ...]], dict[str, str], str]] = [
        (cut, {}, f"tensor {up} is missing; the family qwen3_moe needs it with shape [32, 64]"),
        ({**sound, up: (48, 64)}, {}, f"tensor {up} is [48, 64] bf16, but {first}; {parts}"),
        (sound, {up: "f16"}, f"tensor {up} is [32, 64] f16, but {first}; {parts}"),
        (routed_shapes(5), {}, "mlp.gate.weight has shape [5, 64], but the config says [4, 64]"),
        (routed_shapes(width=48), {}, "has shape [192, 64], but the config says [128, 64]"),
        (routed_shapes(3), {}, "mlp.gate.weight has shape [3, 64], but the config says [4, 64]"),
        (
            {**sound, "model.layers.0.mlp.experts.4.up_proj.weight": (32, 64)},
            {},
            "tensor model.layers.0.mlp.experts.4.up_proj.weight is not part of the family qwen3_moe; every",
        ),
    ]
    for tensors, formats, sentence in cases:
        with pytest.raises(TapeoutError, match=re.escape(sentence)):
            tiny.compile_tiny(tiny.checkpoint(tensors, ROUTED, formats))


def test_experts_of_a_width_that_no_kernel_serves_are_refused() -> None:
    sentence = "an expert has 40 rows; the CPU kernels multiply with experts of a multiple of 16 rows"
    config = {**ROUTED, "moe_intermediate_size": 40}
    with pytest.raises(TapeoutError, match=rf"^model\.layers\.0\.mlp\.experts\.gate_up_proj: {sentence}$"):
        tiny.compile_tiny(tiny.checkpoint(routed_shapes(width=40), config))


@pytest.mark.parametrize("family", HF)
@pytest.mark.parametrize(
    ("tensor", "shape"), [("self_attn.sinks", (4,)), ("self_attn.o_proj.bias", (64,)), ("mlp.gate.weight", (8, 64))]
)
def test_a_tensor_that_no_op_reads_is_refused(family: str, tensor: str, shape: tuple[int, ...]) -> None:
    """Attention sinks, a bias nobody adds, a router: the model would run and answer noise (kekzl/imp#1192)."""
    config = {**CONFIG, "architectures": [HF[family]]}
    tensors = tiny.shapes(config)
    tiny.compile_tiny(tiny.checkpoint(tensors, config))
    name = f"model.layers.0.{tensor}"
    with pytest.raises(TapeoutError, match=f"tensor {re.escape(name)} is not part of the family {family}; every"):
        tiny.compile_tiny(tiny.checkpoint({**tensors, name: shape}, config))


@pytest.mark.parametrize("family", HF)
def test_a_head_that_is_absent_and_not_tied_is_an_error(family: str) -> None:
    """A tied head is absent and becomes random (vllm#53019): tie, or name the contradiction."""
    config = {**CONFIG, "architectures": [HF[family]], "tie_word_embeddings": False}
    sentence = f"tensor lm_head.weight is missing; the family {family} needs it with shape [128, 64]"
    with pytest.raises(TapeoutError, match=re.escape(sentence)):
        tiny.compile_tiny(tiny.checkpoint(config=config))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("pattern", "windows"),
    [(3, (8, 8, 0)), (1, (0, 0, 0)), ([True, False, True], (8, 0, 8)), ([0, 0, 0], (0, 0, 0))],
)
def test_metadata_say_which_layers_slide(family: str, pattern: object, windows: tuple[int, ...]) -> None:
    """A period counts the full layer last, as llama.cpp does; a flag a layer is true where it slides."""
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": pattern}
    assert find_family([family], "here").parse_gguf(metadata(family, **keys), SHAPES).windows == windows


@pytest.mark.parametrize("pattern", [0, True, "all", [True, False]])
def test_a_pattern_that_says_nothing_is_refused(pattern: object) -> None:
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": pattern}
    with pytest.raises(TapeoutError, match=r"qwen2\.attention\.sliding_window_pattern .*must be a p"):
        find_family(["qwen2"], "here").parse_gguf(metadata("qwen2", **keys), SHAPES)


# Families with latent attention: what they refuse beside the settings of every family
NOAUX: Mapping[str, Any] = {**CONFIG, "num_key_value_heads": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 1}
LATENT: dict[str, tuple[str, dict[str, Any], str]] = {
    "another way to choose experts": (
        "DeepseekV3ForCausalLM", {"topk_method": "greedy"}, ": topk_method is 'greedy'; it must be one of noaux_tc"),
    "another score": (
        "DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, ": scoring_func is 'softmax'; it must be one of sigmoid"),
    "a bias that V2 does not have": (
        "DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"},
        ": topk_method is 'noaux_tc'; it must be one of greedy, group_limited_greedy"),
    "normalised weights of V2": (
        "DeepseekV2ForCausalLM", {"norm_topk_prob": True}, f"sets norm_topk_prob = True, {UNSUPPORTED}"),
    "biases of the MLP": ("DeepseekV2ForCausalLM", {"mlp_bias": True}, f"sets mlp_bias = True, {UNSUPPORTED}"),
    "fewer keys than heads": (
        "DeepseekV3ForCausalLM", {"num_key_value_heads": 2}, f"sets num_key_value_heads = 2, {UNSUPPORTED}"),
    "more groups than experts": (
        "DeepseekV3ForCausalLM", {"n_group": 3, "topk_group": 2},
        ": 8 of 256 experts are to be chosen from 2 of 3 groups; groups must be equal, and the open ones must hold as "
        "many experts"),
    "a softmax factor without yarn": (
        "DeepseekV3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        f": rope scaling sets mscale_all_dim = 1.0, {UNSUPPORTED}"),
    "kinds of MLPs": (
        "DeepseekV32ForCausalLM", {"mlp_layer_types": ["dense", "moe", "sparse"]},
        ": mlp_layer_types must list 3 times dense or sparse"),
    "halves in V3.2": (
        "DeepseekV32ForCausalLM", {"rope_interleave": False}, f"sets rope_interleave = False, {UNSUPPORTED}"),
    "pairs in the index of V3.2": (
        "DeepseekV32ForCausalLM", {"indexer_rope_interleave": True},
        f"sets indexer_rope_interleave = True, {UNSUPPORTED}"),
    "shared selections in V3.2": (
        "DeepseekV32ForCausalLM", {"index_topk_freq": 4}, f"sets index_topk_freq = 4, {UNSUPPORTED}"),
    "halves in the index of GLM-5": (
        "GlmMoeDsaForCausalLM", {"indexer_rope_interleave": False},
        f"sets indexer_rope_interleave = False, {UNSUPPORTED}"),
    "an unknown pattern": (
        "GlmMoeDsaForCausalLM", {"index_topk_pattern": "FSX"},
        ": index_topk_pattern must list 3 times full or shared, or be as many F and S"),
    "a first layer that shares": (
        "GlmMoeDsaForCausalLM", {"indexer_types": ["shared", "full", "full"]},
        ": layer 0 shares the selection of a layer before it, and there is none"),
}  # fmt: skip
LATENT_METADATA: dict[str, tuple[str, Any, str]] = {
    "a gate of another kind": ("expert_gating_func", 3, f"sets A.expert_gating_func = 3, {UNSUPPORTED}"),
    "normalised softmax": ("expert_weights_norm", True, f"sets A.expert_weights_norm = True, {UNSUPPORTED}"),
    "a head that is all rope": (
        "rope.dimension_count", 24, ": A.rope.dimension_count is 24, and a head has 24 channels"),
    "a multiplier without yarn": (
        "rope.scaling.yarn_log_multiplier", 0.1,
        f"sets A.rope.scaling.yarn_log_multiplier = 0.1, {UNSUPPORTED}"),
    "an attention scale": ("attention.scale", 0.5, f"sets A.attention.scale = 0.5, {UNSUPPORTED}"),
}  # fmt: skip


@pytest.mark.parametrize("case", LATENT)
def test_a_config_of_latent_attention_is_refused(case: str) -> None:
    architecture, change, sentence = LATENT[case]
    parse = find_family([architecture], "here").parse_hf
    config = {**NOAUX, "architectures": [architecture]}
    parse(config)
    with pytest.raises(TapeoutError, match=f"^config\\.json ?{re.escape(sentence.lstrip())}$"):
        parse({**config, **change})


@pytest.mark.parametrize("case", LATENT_METADATA)
def test_metadata_of_latent_attention_are_refused(case: str) -> None:
    key, value, sentence = LATENT_METADATA[case]
    keys = {"attention.head_count_kv": 1, "attention.kv_lora_rank": 32, "attention.key_length": 40,
            "attention.value_length": 32, "attention.key_length_mla": 24, "attention.value_length_mla": 16,
            "rope.dimension_count": 8, "expert_count": 8, "expert_used_count": 2, "expert_gating_func": 1,
            "expert_feed_forward_length": 32}  # fmt: skip
    shapes = {**SHAPES, "blk.1.ffn_gate_inp.weight": (8, 64), "blk.2.attn_norm.weight": (64,)}
    parse = find_family(["deepseek2"], "here").parse_gguf
    parse(metadata("deepseek2", **keys), shapes)
    sentence = sentence.replace("A.", "deepseek2.")
    with pytest.raises(TapeoutError, match=f"^GGUF metadata ?{re.escape(sentence.lstrip())}$"):
        parse(metadata("deepseek2", **{**keys, key: value}), shapes)


def test_every_family_of_a_file_by_its_name() -> None:
    """``model.family`` overrides what a checkpoint declares, by the name in the table of families."""
    assert [find_family([name], "here").name for name in FAMILIES] == list(FAMILIES)


# what gpt-oss refuses, in either container
GPT_OSS: dict[str, tuple[dict[str, Any], str]] = {
    "another gain": ({"swiglu_alpha": 1.5}, f"sets swiglu_alpha = 1.5, {UNSUPPORTED}"),
    "no limit": ({"swiglu_limit": 0.0}, ": swiglu_limit is 0.0; it must be above zero"),
    "sliding layers without a window": (
        {"sliding_window": None},
        ": sliding_window is null, but layers slide; it must say how many keys they see",
    ),
    "more experts than there are": (
        {"num_local_experts": 2},
        ": 4 of 2 experts are to be chosen; there must be at least as many, and at most 4096",
    ),
    "soft-capped attention": SETTINGS["soft-capped attention"],
}
GPT_OSS_METADATA: dict[str, tuple[Any, str]] = {
    "expert_gating_func": (2, f"sets gpt-oss.expert_gating_func = 2, {UNSUPPORTED}"),
    "expert_weights_scale": (2.5, f"sets gpt-oss.expert_weights_scale = 2.5, {UNSUPPORTED}"),
    "expert_count": (0, ": gpt-oss.expert_count is 0; it must be a positive integer"),
    "attention.scale": (0.5, f"sets gpt-oss.attention.scale = 0.5, {UNSUPPORTED}"),
}


@pytest.mark.parametrize("case", GPT_OSS)
def test_a_config_of_gpt_oss_that_changes_the_mathematics_is_refused(case: str) -> None:
    change, sentence = GPT_OSS[case]
    parse = find_family(["GptOssForCausalLM"], "here").parse_hf
    parse(CONFIG)
    with pytest.raises(TapeoutError, match=f"^config\\.json ?{re.escape(sentence.lstrip())}$"):
        parse({**CONFIG, **change})


@pytest.mark.parametrize("key", GPT_OSS_METADATA)
def test_metadata_of_gpt_oss_that_change_the_mathematics_are_refused(key: str) -> None:
    value, sentence = GPT_OSS_METADATA[key]
    parse, experts = find_family(["gpt-oss"], "here").parse_gguf, {"expert_count": 8, "expert_used_count": 4}
    parse(metadata("gpt-oss", **experts, expert_gating_func=3), SHAPES)
    with pytest.raises(TapeoutError, match=f"^GGUF metadata ?{re.escape(sentence.lstrip())}$"):
        parse(metadata("gpt-oss", **{**experts, key: value}), SHAPES)


@pytest.mark.parametrize(("pattern", "windows"), [(None, (8, 0, 8)), (3, (8, 8, 0)), ([0, 1, 1], (0, 8, 8))])
def test_every_other_layer_of_gpt_oss_slides_unless_metadata_say_otherwise(
    pattern: object, windows: tuple[int, ...]
) -> None:
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": pattern, "expert_count": 8}
    parsed = find_family(["gpt-oss"], "here").parse_gguf(metadata("gpt-oss", **keys, expert_used_count=4), SHAPES)
    assert parsed.windows == windows


def test_a_selection_in_every_layer_is_what_v32_does() -> None:
    parse = find_family(["DeepseekV32ForCausalLM"], "here").parse_hf
    assert parse({**NOAUX, "index_topk_freq": 1}) == parse({**NOAUX, "index_topk_freq": None}) == parse(NOAUX)


def test_a_choice_that_is_null_is_not_made() -> None:
    fields = Fields({"topk_method": None}, "here")
    assert fields.choice("topk_method", {"greedy": "first", "other": "second"}, "greedy") == "first"
