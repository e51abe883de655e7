"""What a family's config may not say: whatever changes the mathematics and is not computed ends in one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import tiny

from tapeout.compiler.models import FAMILIES, find_family
from tapeout.runtime.errors import TapeoutError

CONFIG: Mapping[str, Any] = {**tiny.CONFIG, "num_hidden_layers": 3}
SHAPES = {"token_embd.weight": (128, 64), "output.weight": (128, 64)}
UNSUPPORTED = "which changes the mathematics and is not supported for this family"
HF = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
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
OWN = {"mistral": MISTRAL, "qwen2": QWEN, "qwen3": QWEN}
CONFIG_CASES = [(name, case) for name in HF for case in (*SETTINGS, *OWN.get(name, {}))]

METADATA: dict[str, tuple[Any, str]] = {
    "expert_count": (8, f"sets A.expert_count = 8, {UNSUPPORTED}"),
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
    "attention.sliding_window": (
        8,
        ": A.attention.sliding_window is 8, but which layers slide is not known; A.attention.sliding_window_pattern "
        "must be a period or list true or false for 3 layers",
    )
}
LLAMA_METADATA: dict[str, tuple[Any, str]] = {
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


def test_every_family_of_a_file_by_its_name() -> None:
    """``model.family`` overrides what a checkpoint declares, by the name in the table of families."""
    assert [find_family([name], "here").name for name in FAMILIES] == list(FAMILIES)
