"""Quantized checkpoints through the passes: numbers are kept, for a GPU and for a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from emission import emit_file
from fake_builder import FakeBuilder
from planes_reference import read_back
from raw_tensors import float_quantized, pack_quantized, write_raw
from safetensors.numpy import load_file
from tiny import CONFIG, compile_tiny

from tapeout.compiler.checkpoints import Checkpoint, open_checkpoint
from tapeout.compiler.checkpoints.quantized import weights_of
from tapeout.compiler.devices import load_device
from tapeout.compiler.emit.evaluate import ErrorSums, Evaluator
from tapeout.compiler.emit.native import load_native
from tapeout.compiler.emit.pieces import WeightEntry
from tapeout.compiler.environment import Environment
from tapeout.compiler.layouts import packed_bytes
from tapeout.compiler.pipeline import Results
from tapeout.compiler.recipes import Concat, Convert, Pack, Recipe, Unpack, joined, joins_with
from tapeout.compiler.spec import Quantization
from tapeout.compiler.stages import FusedModel, LogicalModel, QuantizedModel, SelectedModel
from tapeout.runtime.errors import TapeoutError

AT = "model.layers.0"


def source(quantization: dict[str, Any], **sizes: int) -> Checkpoint:
    """A tiny Llama whose projections are packed as ``quantization`` says; headers alone."""
    config = {**CONFIG, **sizes, "quantization_config": quantization}
    shapes: dict[str, tuple[int, ...]] = {}
    formats: dict[str, str] = {}
    for name, shape in tiny.shapes(config).items():
        module, (n, k) = name.removesuffix(".weight"), (*shape, 0)[:2]
        parts: dict[str, tuple[tuple[int, ...], str]] = {".weight": (shape, "bf16")}
        if module.endswith("_proj") and quantization["quant_method"] == "fp8":
            parts = {".weight": (shape, "e4m3"), ".weight_scale_inv": ((-(-n // 128), -(-k // 128)), "f32")}
        elif module.endswith("_proj") and quantization["format"] == "float-quantized":
            parts = {".weight": (shape, "e4m3"), ".weight_scale": ((1,), "bf16"), ".input_scale": ((1,), "bf16")}
        elif module.endswith("_proj"):
            parts = {".weight_packed": ((n, k // 8), "i32"), ".weight_scale": ((n, k // 32), "bf16")}
        shapes |= {module + part: each for part, (each, _) in parts.items()}
        formats |= {module + part: each for part, (_, each) in parts.items()}
    return tiny.checkpoint(shapes, config, formats)


def on_h200(checkpoint: Checkpoint, quantization: Quantization | None = None) -> Results:
    return compile_tiny(checkpoint, quantization, device=load_device("h200"), builder=FakeBuilder())


def kinds(recipe: Recipe) -> list[tuple[str, str]]:
    return [(part.op, part.format) for part in (recipe.parts if isinstance(recipe, Concat) else [recipe])]


def test_int4_is_kept_for_a_gpu() -> None:
    results = on_h200(source(pack_quantized()))
    fused, quantized = results.get(FusedModel), results.get(QuantizedModel)
    assert not quantized.conversions
    recipes = dict(fused.recipes)
    assert kinds(recipes[f"{AT}.self_attn.qkv_proj"]) == 3 * [("unpack", "int4_g32")]
    assert kinds(recipes[f"{AT}.mlp.down_proj"]) == [("unpack", "int4_g32")]
    assert recipes[f"{AT}.mlp.down_proj"].to_json() == {
        "op": "unpack", "packing": "pack-quantized", "to": "int4_g32", "zeros": None,
        "tensor_scale": None, "order": None,
        "codes": {"op": "read", "tensor": f"{AT}.mlp.down_proj.weight_packed", "shape": [64, 12], "format": "i32"},
        "scales": {"op": "read", "tensor": f"{AT}.mlp.down_proj.weight_scale", "shape": [64, 3], "format": "bf16"},
    }  # fmt: skip
    assert recipes["model.embed_tokens"].format == "bf16"


def test_one_scale_a_tensor_keeps_projections_apart() -> None:
    """Requantizing q, k and v to one scale would change their values; they stay three matrices."""
    results = on_h200(source(float_quantized()))
    fused, logical = results.get(FusedModel), results.get(LogicalModel)
    recipes = dict(fused.recipes)
    for part in "qkv":
        assert kinds(recipes[f"{AT}.self_attn.{part}_proj"]) == [("unpack", "fp8")]
    decision = next(each for each in fused.decisions if each.subject.endswith("self_attn.qkv_proj"))
    assert (
        decision.reason
        == "rows that share scales join in whole tiles of one format, and the checkpoint's scales stay as they are"
    )
    assert dict(logical.ignored)[f"{AT}.mlp.up_proj.input_scale"].startswith("activations are not quantized")
    # a conversion reads each under its own scale, so what is converted joins again
    recipes = dict(on_h200(source(float_quantized()), Quantization(default="int4_g32")).get(FusedModel).recipes)
    assert kinds(recipes[f"{AT}.self_attn.qkv_proj"]) == 3 * [("convert", "int4_g32")]
    recipes = dict(on_h200(source(float_quantized()), Quantization(default="fp8_block128")).get(FusedModel).recipes)
    assert kinds(recipes[f"{AT}.self_attn.q_proj"]) == [("convert", "fp8_block128")]


def test_blocks_join_where_their_rows_do() -> None:
    """q has two heads of 64, 128 rows: it joins what follows; k has one, 64 rows, and cannot be followed."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    wide = source(fp8, head_dim=64, num_attention_heads=2, num_key_value_heads=2, intermediate_size=256)
    recipes = dict(on_h200(wide).get(FusedModel).recipes)
    assert kinds(recipes[f"{AT}.self_attn.qkv_proj"]) == 3 * [("unpack", "fp8_block128")]
    assert kinds(recipes[f"{AT}.mlp.gate_up_proj"]) == 2 * [("unpack", "fp8_block128")]
    narrow = source(fp8, head_dim=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=256)
    recipes = dict(on_h200(narrow).get(FusedModel).recipes)
    assert {f"{AT}.self_attn.{part}_proj" for part in "qkv"} <= recipes.keys()


def test_the_cpu_keeps_them_too_and_would_name_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for quantization, kept in ((pack_quantized(), "int4_g32"), (float_quantized(), "fp8")):
        selected = compile_tiny(source(quantization)).get(SelectedModel)
        linear = {kernel.name for kernel in selected.kernels if kernel.template == "linear"}
        assert linear == {"linear_bf16", f"linear_{kept}"}
        with monkeypatch.context() as patch, pytest.raises(TapeoutError) as caught:
            patch.setattr("tapeout.compiler.lowering.cpu.tile16_holds", lambda format, kept=kept: format != kept)
            compile_tiny(source(quantization))
        assert re.match(
            rf"model\.layers\.0\..*: no CPU kernel serves {kept}; quantization\.default or a rule can convert "
            r"it, with allow_requantize true, best to q8_0; those that it could be are f32, f16, bf16, q4_0, ",
            str(caught.value),
        )
        recipes = dict(compile_tiny(source(quantization), Quantization(default="q8_0")).get(FusedModel).recipes)
        assert kinds(recipes[f"{AT}.self_attn.qkv_proj"]) == 3 * [("convert", "q8_0")]
    with pytest.raises(TapeoutError, match=r"q_proj is int4_g32 in the checkpoint and default asks for q8_0, but"):
        compile_tiny(source(pack_quantized()), Quantization(default="q8_0", allow_requantize=False))


def test_a_module_that_the_config_quantizes_and_the_file_does_not() -> None:
    plain = tiny.checkpoint(config={**CONFIG, "quantization_config": pack_quantized()})
    with pytest.raises(TapeoutError, match=r"group_0 quantizes model\.layers\.0\.self_attn\.q_proj \(pack-quantized\)"):
        on_h200(plain)


def test_emission_for_a_gpu_keeps_every_code_and_scale(tmp_path: Path) -> None:
    """Two matrices joined, packed in planes by streaming pieces, read back: the values that the words spell."""
    rng = np.random.default_rng(2)
    rows, k = {"a": 300, "b": 84}, 256
    words = {name: rng.integers(0, 1 << 32, (n, k // 8), np.uint32) for name, n in rows.items()}
    scales = {name: rng.integers(0x3C00, 0x4100, (n, k // 128), np.uint16) for name, n in rows.items()}
    tensors = {f"{name}.weight_packed": ("I32", words[name].shape, words[name].tobytes()) for name in rows}
    tensors |= {f"{name}.weight_scale": ("BF16", scales[name].shape, scales[name].tobytes()) for name in rows}
    folder = write_raw(tmp_path / "m", tensors, {"quantization_config": pack_quantized(128)})
    checkpoint = open_checkpoint(folder)
    weights = weights_of(checkpoint)
    parts = [weights.find(f"{name}.weight") for name in rows]
    recipe = Pack(joined([part for part in parts if part is not None]), "planes")
    nbytes = packed_bytes(recipe.shape, recipe.format, "planes")
    native = load_native(Environment.read().cache / "emit")
    entry = WeightEntry("w", recipe, 0, nbytes + -nbytes % 4096)
    report = emit_file([entry], checkpoint, tmp_path / "w", native)
    nibbles = [words[name][..., None] >> np.arange(0, 32, 4, np.uint32) & 15 for name in rows]
    codes = np.concatenate([each.reshape(-1, k) for each in nibbles]).astype(np.float32) - 8
    scale = np.concatenate([(scales[name].astype(np.uint32) << 16).view(np.float32) for name in rows])
    got = read_back("int4_g128", load_file(tmp_path / "w")["w"], *recipe.shape)
    np.testing.assert_array_equal(got, codes * scale.repeat(128, axis=1))
    assert report.errors == {}


def test_a_number_that_is_nan_is_named(tmp_path: Path) -> None:
    numbers = bytes(64 * 5 + 9) + b"\x7f" + bytes(64 * 8 - 64 * 5 - 10)
    tensors = {"m.weight": ("F8_E4M3", (8, 64), numbers), "m.weight_scale": ("F32", (1,), None)}
    checkpoint = open_checkpoint(write_raw(tmp_path / "m", tensors, {"quantization_config": float_quantized()}))
    recipe = weights_of(checkpoint).find("m.weight")
    assert recipe is not None
    evaluator = Evaluator(checkpoint, load_native(Environment.read().cache / "emit"))
    with pytest.raises(TapeoutError, match=r"tensor 'm\.weight' has NaN/Inf weights in row 5; every weight must be"):
        evaluator.rows(recipe, 2, 8, ErrorSums())


def test_what_joins_under_scales_of_the_checkpoint() -> None:
    unpacked = weights_of(source(float_quantized())).find(f"{AT}.self_attn.q_proj.weight")
    assert isinstance(unpacked, Unpack)
    assert joins_with(unpacked) == f"fp8 {unpacked.digest}"
    assert joins_with(Convert(unpacked, "fp8_block128")) == f"fp8_block128 from fp8 {unpacked.digest}"
    assert joins_with(Convert(unpacked, "q8_0")) == "q8_0"
