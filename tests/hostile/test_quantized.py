"""Quantized checkpoints that contradict themselves: each ends in one sentence that names what, where and the rule."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from raw_tensors import Raw, float_quantized, fp4_quantized, int4_group, pack_quantized, write_raw

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.compiler.checkpoints.quantized import weights_of
from tapeout.compiler.emit.unpack import Unpacker
from tapeout.compiler.recipes import Unpack
from tapeout.runtime.errors import TapeoutError

CONFIG = "config.json: quantization_config: "
FILE = "model.safetensors: "
N, K = 16, 128

INT4: Raw = {
    "m.weight_packed": ("I32", (N, K // 8), None),
    "m.weight_scale": ("BF16", (N, K // 32), None),
    "m.weight_shape": ("I64", (2,), struct.pack("<2q", N, K)),
}
FP8: Raw = {"m.weight": ("F8_E4M3", (N, K), None), "m.weight_scale": ("F32", (1,), None)}
BLOCKS: Raw = {"m.weight": ("F8_E4M3", (N, K), None), "m.weight_scale_inv": ("F32", (1, 1), None)}
GPTQ: Raw = {
    "m.qweight": ("I32", (K // 8, N), None),
    "m.qzeros": ("I32", (K // 32, N // 8), bytes(4 * K // 32 * N // 8)),
    "m.scales": ("F16", (K // 32, N), None),
    "m.g_idx": ("I32", (K,), struct.pack(f"<{K}i", *(k // 32 for k in range(K)))),
}
AWQ: Raw = {
    "m.qweight": ("I32", (K, N // 8), None),
    "m.qzeros": ("I32", (K // 32, N // 8), None),
    "m.scales": ("F16", (K // 32, N), None),
}
NVFP4: Raw = {
    "m.weight_packed": ("U8", (N, K // 2), None),
    "m.weight_scale": ("F8_E4M3", (N, K // 16), None),
    "m.weight_global_scale": ("F32", (1,), struct.pack("<f", 3.0)),
}
MODELOPT: Raw = {
    "m.weight": ("U8", (N, K // 2), None),
    "m.weight_scale": ("F8_E4M3", (N, K // 16), None),
    "m.weight_scale_2": ("F32", (), None),
}
MXFP4: Raw = {"m.weight_packed": ("U8", (N, K // 2), None), "m.weight_scale": ("U8", (N, K // 32), None)}
EXPERTS: Raw = {"m.weight_blocks": ("U8", (2, N, K // 32, 16), None), "m.weight_scales": ("U8", (2, N, K // 32), None)}
V4: Raw = {"m.weight": ("I8", (N, K // 2), None), "m.scale": ("F8_E8M0", (N, K // 32), None)}
INT8: Raw = {"m.weight": ("I8", (N, K), None), "m.weight_scale": ("BF16", (N, 1), None)}
NV = fp4_quantized("nvfp4-pack-quantized", "tensor_group", 16)
MX = fp4_quantized("mxfp4-pack-quantized", "group", 32)
MODELOPT_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT8_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}


def refused(folder: Path, tensors: Raw, quantization: Any, **config: Any) -> str:
    """What finding, and then reading, the weight m is refused with, after the folder's name."""
    write_raw(folder, tensors, {"quantization_config": quantization, **config})
    with pytest.raises(TapeoutError) as caught:
        checkpoint = open_checkpoint(folder)
        recipe = weights_of(checkpoint).find("m.weight")
        assert isinstance(recipe, Unpack)
        Unpacker(checkpoint).rows(recipe, 0, recipe.shape[0])
    text = str(caught.value)
    assert "\n" not in text and text.startswith(str(folder))
    return text[len(str(folder)) :].lstrip("/: ")


def but(tensors: Raw, name: str, dtype: str, shape: tuple[int, ...], data: bytes | None = None) -> Raw:
    return {**tensors, name: (dtype, shape, data)}


def without(tensors: Raw, name: str) -> Raw:
    return {each: value for each, value in tensors.items() if each != name}


def test_sound_ones_are_read(tmp_path: Path) -> None:
    sound: list[tuple[Raw, Mapping[str, Any]]] = [
        (INT4, pack_quantized()),
        (INT4, pack_quantized(config_groups={"a": int4_group(actorder="weight")})),
        (FP8, float_quantized()),
        (but(FP8, "m.weight_scale", "F32", ()), {"quant_method": "fp8"}),
        (BLOCKS, DEEPSEEK),
        (GPTQ, GPTQ_CONFIG),
        (AWQ, AWQ_CONFIG),
        (NVFP4, NV),
        (MXFP4, MX),
        (MODELOPT, MODELOPT_CONFIG),
        (V4, {**DEEPSEEK, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}),
        (INT8, {**pack_quantized(config_groups={"a": INT8_GROUP}), "format": "int-quantized"}),
        (but(FP8, "m.weight_scale", "F32", (N, 1)), float_quantized(strategy="channel")),
    ]
    for at, (tensors, quantization) in enumerate(sound):
        write_raw(tmp_path / str(at), tensors, {"quantization_config": quantization})
        checkpoint = open_checkpoint(tmp_path / str(at))
        recipe = weights_of(checkpoint).find("m.weight")
        assert isinstance(recipe, Unpack) and recipe.shape == (N, K)
        assert len(Unpacker(checkpoint).rows(recipe, 3, 11)) == 8


def test_methods(tmp_path: Path) -> None:
    assert refused(tmp_path, INT4, {"quant_method": "hqq"}) == (
        CONFIG + "quant_method is 'hqq'; read are compressed-tensors, fp8, gptq, awq, modelopt, mxfp4"
    )
    assert refused(tmp_path, INT4, 4) == "config.json: quantization_config is 4; it must be an object"
    assert refused(tmp_path, INT4, pack_quantized(), text_config={"quantization_config": DEEPSEEK}) == (
        "config.json: quantization_config and text_config.quantization_config differ; leave the one that is right"
    )
    text = refused(tmp_path, FP8, None)
    assert text.startswith(FILE + "tensor 'm.weight' holds e4m3 codes without scales; they are weights only under a ")


GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"config_groups": {}}, "config_groups is missing or empty; it must say which modules are quantized, and how"),
    ({"config_groups": {"W4A16": ["Linear"]}},
     "config_groups.W4A16 is ['Linear']; it must be an object with targets and weights"),
    ({"config_groups": {"a": int4_group(), "b": int4_group(64)}},
     "config_groups.a and config_groups.b both target 'Linear', with different weights; a module has one scheme"),
    ({"config_groups": {"a": int4_group(strategy="channel")}},
     "config_groups.a.weights has strategy 'channel' and group_size 32, which contradict each other; "
     "strategy group needs a group_size above zero, and no other has one"),
    ({"config_groups": {"a": int4_group(actorder="group")}},
     "config_groups.a.weights.actorder is 'group', which spreads a group over columns out of order; "
     "formats here need groups of neighbours, as actorder weight or static give them"),
    ({"config_groups": {"a": int4_group(num_bits=3)}},
     "config_groups.a has weights of 3 bits, type int, strategy group; "
     "of pack-quantized weights 4 or 8-bit int in strategy group or channel are read, those of 8 bits symmetric"),
    ({"ignore": ["re:("]},
     "ignore has the pattern 're:(', which is no regular expression "
     "(missing ), unterminated subpattern at position 0)"),
    ({"ignore": "lm_head"}, "ignore is 'lm_head'; it must be a list of names"),
    ({"ignore": ["m"]},
     "tensor 'm.weight_packed' holds i32 codes, but no target of config_groups matches m, or ignore does; "
     "a packed weight needs a scheme"),
    ({"format": "float-quantized"},
     "config_groups.group_0 says format 'float-quantized' for m, whose tensor 'm.weight_packed' is i32; "
     "weights like that are pack-quantized"),
    ({"transform_config": {"config_groups": {}}},
     "transform_config is set, which changes the weights; it must be absent, as it is not supported"),
    ({"config_groups": {"a": int4_group(group_size=0)}},
     "config_groups.a.weights.group_size is 0; it must be a positive integer, or -1 for whole rows"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), GROUPS)
def test_config_groups(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert refused(tmp_path, INT4, pack_quantized(**changes)) == CONFIG + text


TENSORS: list[tuple[Raw, Any, str]] = [
    (without(INT4, "m.weight_scale"), pack_quantized(),
     FILE + "tensor 'm.weight_scale' is missing; 'm.weight_packed' holds codes, which mean nothing without it: "
     "fetch the checkpoint again, or the index leaves it out"),
    (but(INT4, "m.weight_scale", "BF16", (N, 3)), pack_quantized(),
     FILE + "tensor 'm.weight_scale' has shape [16, 3]; groups of 32 over [16, 128] need [16, 4]"),
    (INT4, pack_quantized(64),
     FILE + "tensor 'm.weight_scale' has shape [16, 4]; groups of 64 over [16, 128] need [16, 2]"),
    (INT4, pack_quantized(48),
     FILE + "tensor 'm.weight_packed' has rows of 128 elements, which are not whole groups of group_size 48 "
     "as quantization_config says; it must divide them"),
    (but(INT4, "m.weight_scale", "BF16", (N, 8)), pack_quantized(16),
     FILE + "tensor 'm.weight_packed' has groups of 16 under bf16 scales; groups must be multiples of 32"),
    (but(INT4, "m.weight_scale", "F32", (N, 4)), pack_quantized(),
     FILE + "tensor 'm.weight_scale' is f32; it must be bf16 or f16, "
     "as no format here holds compressed-tensors weights under anything else"),
    (but(INT4, "m.weight_scale", "BF16", (N, 4), bytes(2 * 38) + b"\xc0\x7f" + bytes(2 * 25)), pack_quantized(),
     FILE + "tensor 'm.weight_scale' holds NaN/Inf in row 9, group 2; every scale must be finite, so the file is "
     "damaged or the model was saved after it diverged"),
    (but(INT4, "m.weight_shape", "I64", (2,), struct.pack("<2q", N, 64)), pack_quantized(),
     CONFIG + "tensor 'm.weight_shape' says [16, 64], but the packed weight is [16, 128]; "
     "they must agree: the file is damaged"),
    (but(INT4, "m.weight_zero_point", "I32", (2, 4)), pack_quantized(),
     CONFIG + "config_groups.group_0 is symmetric, but there is a tensor 'm.weight_zero_point'; "
     "say symmetric: false if it counts"),
    (INT4, pack_quantized(config_groups={"a": int4_group(symmetric=False)}),
     FILE + "tensor 'm.weight_zero_point' is missing; 'm.weight_packed' holds codes, which mean nothing without it: "
     "fetch the checkpoint again, or the index leaves it out"),
    ({"m.weight": ("BF16", (N, K), None)}, pack_quantized(),
     CONFIG + "config_groups.group_0 quantizes m (pack-quantized), but tensor 'm.weight' is plain bf16; "
     "name the module in ignore if that is right"),
    (but(FP8, "m.weight_scale", "F32", (N, 1)), float_quantized(),
     FILE + "tensor 'm.weight_scale' has shape [16, 1]; weights under one scale a tensor need [1]"),
    (FP8, float_quantized(strategy="group", group_size=32),
     CONFIG + "config_groups.group_0 has weights of 8 bits, type float, strategy group; of float-quantized weights "
     "symmetric 8-bit float with one scale a tensor, a channel, or a block of 128x128, are read"),
    (FP8, float_quantized(strategy="channel"),
     FILE + "tensor 'm.weight_scale' has shape [1]; one scale a row over [16, 128] need [16, 1]"),
    (but(FP8, "m.weight_scale", "F32", (1,), struct.pack("<f", float("inf"))), float_quantized(),
     FILE + "tensor 'm.weight_scale' holds NaN/Inf in place [0, 0]; every scale must be finite, so the file is damaged "
     "or the model was saved after it diverged"),
    (but(BLOCKS, "m.weight_scale_inv", "F32", (2, 1)), DEEPSEEK,
     FILE + "tensor 'm.weight_scale_inv' has shape [2, 1]; blocks of 128 x 128 over [16, 128] need [1, 1]"),
    (BLOCKS, {**DEEPSEEK, "weight_block_size": [64, 128]},
     CONFIG + "weight_block_size is [64, 128]; read are [128, 128], and none for one scale a tensor"),
    (BLOCKS, {"quant_method": "fp8"},
     CONFIG + "weight_block_size is None, under which scales are called *.weight_scale, "
     "but there is a tensor 'm.weight_scale_inv'"),
    (BLOCKS, {**DEEPSEEK, "modules_to_not_convert": ["m"]},
     CONFIG + "modules_to_not_convert names m, but tensor 'm.weight' is e4m3; one of both must go"),
    (but(BLOCKS, "m.weight", "BF16", (N, K)), DEEPSEEK,
     CONFIG + "tensor 'm.weight' is plain bf16, but there is a tensor 'm.weight_scale_inv'; "
     "scales belong to codes alone"),
    (GPTQ, {**GPTQ_CONFIG, "bits": 8}, CONFIG + "bits is 8; of gptq weights those of 4 bits are read"),
    (GPTQ, {**GPTQ_CONFIG, "checkpoint_format": "marlin"},
     CONFIG + "checkpoint_format is 'marlin'; read are gptq and gptq_v2"),
    (but(GPTQ, "m.g_idx", "I32", (K,), struct.pack(f"<{K}i", *(k % 5 for k in range(K)))),
     {**GPTQ_CONFIG, "desc_act": True},
     FILE + "tensor 'm.g_idx' puts column 4 in group 4; 128 columns in groups of 32 have groups 0 to 3"),
    (without(GPTQ, "m.g_idx"), {**GPTQ_CONFIG, "desc_act": True},
     CONFIG + "desc_act is true, but there is no tensor 'm.g_idx' that says the order"),
    (GPTQ, {**GPTQ_CONFIG, "sym": True},
     FILE + "tensor 'm.qzeros' holds a zero point other than 8 for row 0, but quantization_config says sym: true, "
     "under which every zero point is 8; say sym: false if the file is right"),
    (but(GPTQ, "m.qzeros", "I32", (4, 2), b"\x00\xf0" + bytes(30)), GPTQ_CONFIG,
     FILE + "tensor 'm.qzeros' stores the zero point 15 for row 3, which files of checkpoint_format gptq write for 0 "
     "as for 16; save the model as gptq_v2, which is unambiguous"),
    (GPTQ, {**GPTQ_CONFIG, "dynamic": {"-:lm_head": {}, "+:.*down": {"bits": 8}}},
     CONFIG + "dynamic gives modules that match '+:.*down' settings of their own, which is not supported; "
     "patterns that begin with -: (modules left alone) are"),
    (AWQ, {**AWQ_CONFIG, "version": "gemv"}, CONFIG + "version is 'gemv', whose words lie otherwise; gemm is read"),
    (AWQ, {**AWQ_CONFIG, "zero_point": False},
     CONFIG + "zero_point is false; of awq weights those with zero points are read"),
    (but(AWQ, "m.qzeros", "I32", (4, 1)), AWQ_CONFIG,
     FILE + "tensor 'm.qzeros' has shape [4, 1]; zero points of groups of 32 over [16, 128] need [4, 2]"),
]  # fmt: skip


FP4: list[tuple[Raw, Any, str]] = [
    (NVFP4, fp4_quantized("nvfp4-pack-quantized", "group", 32),
     CONFIG + "config_groups.group_0 has weights of 4 bits, type float, strategy group, group_size 32; "
     "nvfp4-pack-quantized is symmetric 4-bit float in strategy tensor_group of group_size 16"),
    (NVFP4, fp4_quantized("mxfp6-pack-quantized", "group", 32),
     CONFIG + "config_groups.group_0 says format 'mxfp6-pack-quantized' for m, whose tensor 'm.weight_packed' is u8; "
     "weights like that are nvfp4-pack-quantized or mxfp4-pack-quantized"),
    (but(NVFP4, "m.weight_scale", "F8_E4M3", (N, K // 32)), NV,
     FILE + "tensor 'm.weight_scale' has shape [16, 4]; groups of 16 over [16, 128] need [16, 8]"),
    (but(NVFP4, "m.weight_scale", "F8_E4M3", (N, K // 16), bytes(27) + b"\x7f" + bytes(100)), NV,
     FILE + "tensor 'm.weight_scale' holds NaN/Inf in row 3, group 3; every scale must be finite, so the file is "
     "damaged or the model was saved after it diverged"),
    (without(NVFP4, "m.weight_global_scale"), NV,
     FILE + "tensor 'm.weight_global_scale' is missing; 'm.weight_packed' holds codes, which mean nothing without it: "
     "fetch the checkpoint again, or the index leaves it out"),
    (but(NVFP4, "m.weight_global_scale", "F32", (1,)), NV,
     FILE + "tensor 'm.weight_global_scale' is 0, and weights are divided by it"),
    (but(NVFP4, "m.weight_global_scale", "F32", (2,)), NV,
     FILE + "tensor 'm.weight_global_scale' has shape [2]; nvfp4 weights need [1]"),
    (but(MXFP4, "m.weight_scale", "U8", (N, K // 32), bytes(9) + b"\xff" + bytes(54)), MX,
     FILE + "tensor 'm.weight_scale' holds NaN/Inf in row 2, group 1; every scale must be finite, so the file is "
     "damaged or the model was saved after it diverged"),
    (but(but(MXFP4, "m.weight_packed", "U8", (N, 24)), "m.weight_scale", "U8", (N, 1)), MX,
     FILE + "tensor 'm.weight_packed' has rows of 48 elements, which are not whole blocks of 32 as mxfp4 has them here "
     "(32 share a scale)"),
    (MODELOPT, {**MODELOPT_CONFIG, "quant_algo": "W4A8_AWQ"},
     CONFIG + "quant_algo is 'W4A8_AWQ'; read are NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN, MIXED_PRECISION"),
    (MODELOPT, {**MODELOPT_CONFIG, "quant_algo": "FP8"},
     CONFIG + "quant_algo of m is FP8, but tensor 'm.weight' holds u8 codes; NVFP4 weights are u8, FP8 ones e4m3"),
    (MODELOPT, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"n": {}}},
     CONFIG + "quantized_layers.n.quant_algo is None; read are NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN"),
    (MODELOPT, {**MODELOPT_CONFIG, "ignore": ["lm_head", "m*"]},
     CONFIG + "exclude_modules has 'm*', which names m, but tensor 'm.weight' holds u8 codes; one of both must go"),
    (but(MODELOPT, "m.weight", "BF16", (N, K)), MODELOPT_CONFIG,
     CONFIG + "tensor 'm.weight' is plain bf16, but there is a tensor 'm.weight_scale'; scales belong to codes alone"),
    (but(MODELOPT, "m.pre_quant_scale", "BF16", (K,)), MODELOPT_CONFIG,
     CONFIG + "tensor 'm.pre_quant_scale' scales activations before the weight, which is not supported; "
     "export the model with it folded into the layer before"),
    (but(EXPERTS, "m.weight_scales", "U8", (2, N, 3)), GPT_OSS,
     FILE + "tensor 'm.weight_scales' has shape [2, 16, 3]; blocks [2, 16, 4, 16] need [2, 16, 4]"),
    (EXPERTS, {**GPT_OSS, "modules_to_not_convert": ["m"]},
     CONFIG + "modules_to_not_convert names m.weight ('m'), but tensor 'm.weight_blocks' is u8; one of both must go"),
    (EXPERTS, {**GPT_OSS, "modules_to_not_convert": ["model.layers.("]},
     CONFIG + "modules_to_not_convert has the pattern 'model.layers.(', which is no regular expression "
     "(missing ), unterminated subpattern at position 13)"),
    (V4, {**DEEPSEEK, "expert_dtype": "fp8"},
     CONFIG + "tensor 'm.weight' is i8; quantized weights of quant_method fp8 are e4m3"),
    (but(V4, "m.scale", "F8_E8M0", (1, 1)), DEEPSEEK,
     FILE + "tensor 'm.scale' has shape [1, 1]; groups of 32 over [16, 128] need [16, 4]"),
    (but(BLOCKS, "m.weight_scale_inv", "F8_E8M0", (1, 1), b"\xff"), DEEPSEEK,
     FILE + "tensor 'm.weight_scale_inv' holds NaN/Inf in place [0, 0]; every scale must be finite, so the file is "
     "damaged or the model was saved after it diverged"),
    (INT8, {**pack_quantized(), "config_groups": {"a": INT8_GROUP}},
     CONFIG + "config_groups.a says format 'pack-quantized' for m, whose tensor 'm.weight' is i8; "
     "weights like that are int-quantized or naive-quantized"),
]  # fmt: skip


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    """hf_quant_config.json alone is read; beside a quantization_config it must agree."""
    write_raw(tmp_path, MODELOPT, {})
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": settings}))
    assert isinstance(weights_of(open_checkpoint(tmp_path)).find("m.weight"), Unpack)
    assert refused(tmp_path, MODELOPT, {**MODELOPT_CONFIG, "quant_algo": "FP8"}) == (
        "config.json: quantization_config says modelopt FP8 and hf_quant_config.json modelopt NVFP4; "
        "leave the one that is right"
    )
    settings["exclude_modules"] = ["m"]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    assert refused(tmp_path, MODELOPT, None).startswith("hf_quant_config.json: exclude_modules has 'm', which names m")


@pytest.mark.parametrize(("tensors", "quantization", "text"), [*TENSORS, *FP4])
def test_tensors_that_contradict_the_config(tensors: Raw, quantization: Any, text: str, tmp_path: Path) -> None:
    assert refused(tmp_path, tensors, quantization) == text
