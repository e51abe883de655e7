"""Quantized checkpoints against compressed-tensors itself, and against GPTQ's and AWQ's packing written out."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import packed
import pytest
import torch
import witness
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match, match_targets
from test_families import TOLERANCE, build, relative_error
from witness import kl_divergence, token_ids

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.compiler.checkpoints.compressed_tensors import CompressedTensors
from tapeout.compiler.checkpoints.names import matches_start
from tapeout.compiler.checkpoints.quantized import weights_of
from tapeout.compiler.emit.evaluate import ErrorSums, Evaluator
from tapeout.compiler.emit.native import Native, load_native
from tapeout.compiler.environment import Environment
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.recipes import Unpack
from tapeout.compiler.spec import Quantization
from tapeout.compiler.verify.reference import Reference
from tapeout.runtime import load
from tapeout.runtime.errors import TapeoutError

Floats = npt.NDArray[np.float32]
BLOCKS = 100_000


@pytest.fixture(scope="session")
def native() -> Native:
    return load_native(Environment.read().cache / "emit")


def decoded(folder: Path, native: Native, step: int = 37) -> tuple[str, Floats]:
    """Format and values of the one weight, evaluated in strips that meet neither words nor tiles."""
    checkpoint = open_checkpoint(folder)
    recipe = weights_of(checkpoint).find("m.weight")
    assert isinstance(recipe, Unpack)
    evaluator, rows, k = Evaluator(checkpoint, native), math.prod(recipe.shape[:-1]), recipe.shape[-1]
    pieces: list[Floats] = []
    for start in range(0, rows, step):
        data = evaluator.rows(recipe, start, min(start + step, rows), ErrorSums())
        pieces.append(native.decode(recipe.format, data, k))
        np.testing.assert_array_equal(pieces[-1].view(np.uint32), FORMATS[recipe.format].decode(data).view(np.uint32))
    return recipe.format, np.concatenate(pieces)


def write(folder: Path, tensors: packed.Tensors, quantization: Mapping[str, Any]) -> Path:
    raw = {"architectures": ["LlamaForCausalLM"], "quantization_config": dict(quantization)}
    return packed.write(folder, {f"m.{name}": each for name, each in tensors.items()}, raw)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of either sign and many sizes; 15 times the largest stays within float16."""
    values = rng.normal(size=shape) * 2.0 ** rng.integers(-14, 8, shape)
    return torch.from_numpy(values).to(dtype)


def same(got: Floats, wanted: Floats) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


INT4 = [
    (32, False, torch.bfloat16, "int4_g32"), (64, False, torch.bfloat16, "int4_g64"),
    (128, False, torch.bfloat16, "int4_g128"), (32, True, torch.bfloat16, "int4_g32_zp"),
    (64, True, torch.bfloat16, "int4_g64_zp"), (128, True, torch.bfloat16, "int4_g128_zp"),
    (128, False, torch.float16, "q4_0"), (64, True, torch.float16, "int4_g32_zp_f16"),
    (128, True, torch.float16, "int4_g128_zp_f16"), (-1, False, torch.bfloat16, "int4_g128"),
    (-1, True, torch.float16, "int4_g32_zp_f16"),
]  # fmt: skip


@pytest.mark.parametrize(("group", "zeros", "dtype", "format"), INT4)
def test_int4_is_compressed_tensors_bit_for_bit(
    group: int, zeros: bool, dtype: torch.dtype, format: str, native: Native, tmp_path: Path
) -> None:
    """``BLOCKS`` random groups: exact products, which rounded to the type of the scale are what the library gives."""
    rng = np.random.default_rng([group + 1, zeros])
    k = 96 if (group, zeros) == (-1, True) else 2048
    size = k if group == -1 else group
    rows = -(-BLOCKS * min(size, 128) // k) if group != -1 else 1000
    codes = torch.from_numpy(rng.integers(-8, 8, (rows, k)).astype(np.int8))
    scale = random_scales(rng, (rows, k // size), dtype)
    zero = torch.from_numpy(rng.integers(-8, 8, scale.shape).astype(np.int8)) if zeros else None
    tensors, exact = packed.pack_quantized(codes, scale, zero, group)
    folder = write(tmp_path, tensors, packed.config(packed.int4_args(group, zeros), "pack-quantized"))
    found, got = decoded(folder, native)
    assert found == format
    same(got, exact)
    library = packed.decompressed(tensors, group, scale)
    assert torch.equal(torch.from_numpy(got).to(dtype), library)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_fp8_is_compressed_tensors_bit_for_bit(
    method: str, blocks: bool, dtype: torch.dtype, native: Native, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    shape = (300, 12_032)  # 112,800 blocks of 32
    bits = rng.integers(0, 256, shape, dtype=np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0
    scale = random_scales(rng, (3, 94) if blocks else (1,), dtype).abs()
    codes = torch.from_numpy(bits).view(torch.float8_e4m3fn)
    name = "weight_scale_inv" if method == "fp8" and blocks else "weight_scale"
    tensors, exact = packed.fp8(codes, scale, blocks, name)
    quantization: dict[str, Any] = packed.config(packed.fp8_args(blocks), "float-quantized")
    if method == "fp8":
        quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        quantization |= {"weight_block_size": [128, 128]} if blocks else {}
    found, got = decoded(write(tmp_path, tensors, quantization), native)
    assert found == ("fp8_block128" if blocks else "fp8")
    same(got, exact)


def random_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    bits = rng.integers(0, 256, shape, dtype=np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0
    return torch.from_numpy(bits).view(torch.float8_e4m3fn)


def test_fp8_under_a_scale_a_row_is_compressed_tensors(native: Native, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    scale = random_scales(rng, (300, 1), torch.bfloat16)
    tensors, exact = packed.fp8_rows(random_e4m3(rng, (300, 12_032)), scale)
    quantization = packed.config({**packed.fp8_args(False), "strategy": "channel"}, "float-quantized")
    found, got = decoded(write(tmp_path, tensors, quantization), native)
    assert found == "fp8_row"
    same(got, exact)


@pytest.mark.parametrize(
    ("words", "group", "dtype", "format"),
    [(False, -1, torch.bfloat16, "int8_g128"), (True, 128, torch.bfloat16, "int8_g128"),
     (True, 32, torch.bfloat16, "int8_g32"), (True, 64, torch.float16, "q8_0")],
)  # fmt: skip
def test_int8_is_compressed_tensors(
    words: bool, group: int, dtype: torch.dtype, format: str, native: Native, tmp_path: Path
) -> None:
    rng = np.random.default_rng(group + 1)
    shape = (300, 1280)
    codes = torch.from_numpy(rng.integers(-128, 128, shape).astype(np.int8))
    scale = random_scales(rng, (shape[0], 1 if group == -1 else shape[1] // group), dtype)
    tensors, exact = packed.int8(codes, scale, words)
    stored = "pack-quantized" if words else "int-quantized"
    found, got = decoded(write(tmp_path, tensors, packed.config(packed.int8_args(group), stored)), native)
    assert found == format
    same(got, exact)


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
TRANSPOSED: list[tuple[dict[str, Any], int, str]] = [
    ({**GPTQ, "sym": False}, 128, "int4_g128_zp_f16"),
    ({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, 32, "int4_g32_zp_f16"),
    ({**GPTQ, "sym": True}, 128, "q4_0"),
    ({**GPTQ, "sym": True, "desc_act": True, "static_groups": True}, -1, "q4_0"),
    ({"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}, 128, "int4_g128_zp_f16"),
    ({"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}, 64, "int4_g32_zp_f16"),
]


@pytest.mark.parametrize(("quantization", "group", "format"), TRANSPOSED)
def test_gptq_and_awq_are_their_packing_written_out(
    quantization: dict[str, Any], group: int, format: str, native: Native, tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    k, rows = 1280, 1304
    size = k if group == -1 else group
    rows = max(rows, -(-BLOCKS * size // k // 8) * 8) if group > 0 else rows
    codes = rng.integers(0, 16, (rows, k))
    scale = random_scales(rng, (rows, k // size), torch.float16)
    kind = quantization["quant_method"]
    version = 2 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    zero = rng.integers(1, 16, (rows, k // size)) if not quantization.get("sym") else np.full((rows, k // size), 8)
    if kind == "awq" or version == 2:
        zero = (zero + 1) % 16  # these have 0 as well
    tensors, exact = packed.awq(codes, scale, zero) if kind == "awq" else packed.gptq(codes, scale, zero, version)
    folder = write(tmp_path, tensors, {**quantization, "group_size": group})
    found, got = decoded(folder, native)
    assert found == format
    same(got, exact)


@pytest.mark.parametrize("version", [1, 2])
def test_act_order_is_read_as_floats(version: int, native: Native, tmp_path: Path) -> None:
    """``g_idx`` out of order: every column under the scale and zero point of its group, 100,000 groups."""
    rng = np.random.default_rng(version)
    codes, scale = rng.integers(0, 16, (2504, 1280)), random_scales(rng, (2504, 40), torch.float16)
    zero = rng.integers(1, 16, scale.shape)
    tensors, exact = packed.gptq(codes, scale, zero, version, rng.permutation(1280) // 32)
    quantization = {**GPTQ, "sym": False, "desc_act": True, "group_size": 32}
    folder = write(tmp_path, tensors, {**quantization, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"})
    found, got = decoded(folder, native, step=500)
    assert found == "f32"
    same(got, exact)


def test_words_are_the_published_vectors(native: Native, tmp_path: Path) -> None:
    """By hand: a row of pack-quantized codes, a word of AWQ, and zero points of GPTQ v1."""
    ramp = torch.arange(-8, 8, dtype=torch.int8).repeat(2)[None]
    row, _ = packed.pack_quantized(ramp, torch.ones(1, 1, dtype=torch.bfloat16), None, 32)
    assert [word & 0xFFFFFFFF for word in row["weight_packed"][0, :2].tolist()] == [0x76543210, 0xFEDCBA98]
    numbers = np.arange(8)[None]
    assert packed.words(numbers, packed.AWQ_ORDER).tolist() == [[0x75316420]]
    assert packed.words(numbers).tolist() == [[0x76543210]]
    codes, scale = np.full((8, 32), 8), torch.ones(8, 1, dtype=torch.float16)
    tensors, _ = packed.gptq(codes, scale, np.full((8, 1), 8))
    assert tensors["qzeros"].tolist() == [[0x77777777]]
    _, got = decoded(write(tmp_path, tensors, {**GPTQ, "sym": True, "group_size": 32}), native)
    assert not got.any()


# ---- which module has which scheme -------------------------------------------------------------------------------

MODULES = [
    *(f"model.layers.{layer}.{part}" for layer in (0, 1, 10) for part in ("self_attn.q_proj", "mlp.down_proj")),
    "lm_head", "model.embed_tokens",
]  # fmt: skip
TARGETS = [
    {"a": ["Linear"]},
    {"a": ["Linear"], "b": ["re:.*down_proj"]},
    {"a": ["re:.*self_attn.*"], "b": ["re:model.layers.1.*"]},
    {"a": ["re:model[.]layers[.]1[.]"], "b": ["model.layers.1.mlp.down_proj"], "c": ["Linear"]},
    {"a": ["re:layers"], "b": ["down_proj"]},
    {"a": ["Embedding"], "b": ["model.layers.0.self_attn.q_proj", "re:lm_head$"]},
]
IGNORES: list[list[str]] = [[], ["lm_head"], ["re:.*layers[.]0.*"], ["Linear"], ["re:down", "model.embed_tokens"]]


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("ignore", IGNORES)
def test_schemes_are_those_of_compressed_tensors(
    targets: dict[str, list[str]], ignore: list[str], tmp_path: Path
) -> None:
    groups = {
        name: {"targets": listed, "weights": packed.int4_args(32 << index, False)}
        for index, (name, listed) in enumerate(targets.items())
    }
    raw = {**packed.config({}, "pack-quantized"), "config_groups": groups, "ignore": ignore}
    library = QuantizationConfig.model_validate(raw)
    schemes = {target: scheme for scheme in library.config_groups.values() for target in scheme.targets}
    ours = weights_of(open_checkpoint(write(tmp_path, {"bias": torch.zeros(2)}, raw)))
    assert isinstance(ours, CompressedTensors)
    for name in MODULES:
        module = torch.nn.Embedding(2, 2) if name.endswith("embed_tokens") else torch.nn.Linear(2, 2)
        matched = match_targets(name, module, schemes) if not is_match(name, module, ignore) else []
        size = schemes[matched[0]].weights.group_size if matched else None
        found = ours.scheme_of(name)
        assert (found.group_size if found else None) == size, name


PATTERNS = [
    ["lm_head"], ["model.layers.0"], ["model.layers.1"], ["model.layers.*.self_attn", "mlp.down"], ["down_proj"],
    ["model.layers.1.mlp.down_proj", "q"], ["proj"], ["model.layers.(0|10).mlp"],
]  # fmt: skip


@pytest.mark.parametrize("patterns", PATTERNS)
def test_modules_to_not_convert_are_those_of_transformers(patterns: list[str]) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    for name in MODULES:
        assert (matches_start(name, patterns) is None) == should_convert_module(name, patterns), name


# ---- whole models ------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
MODELS: dict[str, tuple[dict[str, Any], packed.Pack]] = {
    "pack-quantized": (
        packed.config(packed.int4_args(128, False), "pack-quantized"),
        packed.int4_packer(128, False, torch.bfloat16),
    ),
    "pack-quantized-zeros": (
        packed.config(packed.int4_args(32, True), "pack-quantized"),
        packed.int4_packer(32, True, torch.bfloat16),
    ),
    "float-quantized": (
        packed.config(packed.fp8_args(False), "float-quantized"),
        packed.fp8_packer(False, torch.bfloat16),
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        packed.fp8_packer(True, torch.float32, "weight_scale_inv"),
    ),
    "nvfp4": (packed.config(packed.fp4_args("nvfp4"), "nvfp4-pack-quantized"), packed.nvfp4_packer(False)),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, packed.nvfp4_packer(True)),
    "gptq": ({**GPTQ, "sym": False, "group_size": 128}, packed.transposed_packer("gptq", 128, True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, packed.transposed_packer("awq", 64, True)),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_on_the_cpu(case: str, tmp_path: Path) -> None:
    """Requantized to q8_0 within its error, and with float32 activations as transformers on the dequantized weights."""
    quantization, pack = MODELS[case]
    source, ids = tmp_path / "hf", token_ids(60)
    held = packed.write_model(witness.llama(**SIZES), source, quantization, pack)
    expected = held.logits(ids)
    with load(build(source, tmp_path / "q8_0", Quantization(default="q8_0"))) as model:
        assert kl_divergence(expected, model.logits(ids)).mean() <= 5e-3
        errors = [weight["error"]["relative_rms"] for weight in model.plan["weights"] if "error" in weight]
        assert len(errors) > 4 * 4 and max(errors) < 0.02
    with load(build(source, tmp_path / "f32", Quantization(activations="f32"))) as model:
        assert relative_error(model.logits(ids), expected) <= TOLERANCE


def test_symmetric_float16_groups_run_on_the_cpu_as_they_are(tmp_path: Path) -> None:
    """They are q4_0: no conversion."""
    pack = packed.transposed_packer("gptq", 128, False)
    quantization = {**GPTQ, "sym": True, "group_size": 128}
    held = packed.write_model(witness.llama(**SIZES), tmp_path / "hf", quantization, pack)
    ids = token_ids(60)
    with load(build(tmp_path / "hf", tmp_path / "artifact")) as model:
        assert {w["format"] for w in model.plan["weights"] if w["name"].endswith("_proj")} == {"q4_0"}
        assert not [weight for weight in model.plan["weights"] if "error" in weight]
        assert kl_divergence(held.logits(ids), model.logits(ids)).mean() <= 5e-3


@pytest.mark.filterwarnings("ignore:You passed")
def test_transformers_reads_the_same_weights(native: Native, tmp_path: Path) -> None:
    """transformers with compressed-tensors loads the folder; its weights are ours, rounded to the scales' type."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    quantization, pack = MODELS["pack-quantized"]
    packed.write_model(witness.llama(**SIZES), tmp_path, quantization, pack)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    checkpoint = open_checkpoint(tmp_path)
    weights, evaluator = weights_of(checkpoint), Evaluator(checkpoint, native)
    for layer, part in itertools.product(range(4), ("self_attn.k_proj", "mlp.down_proj")):
        name = f"model.layers.{layer}.{part}.weight"
        recipe = weights.find(name)
        assert recipe is not None
        rows = evaluator.rows(recipe, 0, recipe.shape[0], ErrorSums())
        ours = torch.from_numpy(native.decode(recipe.format, rows, recipe.shape[1]))
        theirs = model.get_parameter(name).detach()
        assert torch.equal(ours.to(torch.bfloat16), theirs.to(torch.bfloat16)), name


def test_a_reference_that_transformers_cannot_load_is_one_sentence(tmp_path: Path) -> None:
    quantization, pack = MODELS["gptq"]
    packed.write_model(witness.llama(**SIZES), tmp_path, quantization, pack)
    if importlib.util.find_spec("optimum"):
        pytest.skip("transformers loads it")
    with pytest.raises(TapeoutError, match=r"cannot load this checkpoint as a reference \(Loading a GPTQ .* optimum"):
        Reference.open(tmp_path, "safetensors")
