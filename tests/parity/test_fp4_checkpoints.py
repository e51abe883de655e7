"""Four-bit floats of every packing against compressed-tensors, transformers and gguf-py; what GGUF reads as floats."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import packed
import pytest
import torch
from test_quantized_checkpoints import decoded, native, random_e4m3, same, write

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.compiler.checkpoints.quantized import weights_of
from tapeout.compiler.emit.evaluate import ErrorSums, Evaluator
from tapeout.compiler.emit.native import Native
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.recipes import Convert
from tapeout.runtime.errors import TapeoutError

Floats = npt.NDArray[np.float32]
__all__ = ["native"]  # the fixture

FP4_SHAPE = (1000, 3232)  # 101,000 blocks of 32


def random_fp4(rng: np.random.Generator, rows: int = FP4_SHAPE[0], k: int = FP4_SHAPE[1]) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, (rows, k // 2), dtype=np.uint8))


def equal_numbers(got: Floats, wanted: Floats) -> None:
    """Bit for bit, but that the table of integers has no -0."""
    same(got + np.float32(0), wanted + np.float32(0))


def test_mxfp4_is_compressed_tensors_bit_for_bit(native: Native, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    scale = torch.from_numpy(rng.integers(2, 253, (FP4_SHAPE[0], FP4_SHAPE[1] // 32), dtype=np.uint8))
    tensors = {"weight_packed": random_fp4(rng), "weight_scale": scale}
    folder = write(tmp_path, tensors, packed.config(packed.fp4_args("mxfp4"), "mxfp4-pack-quantized"))
    found, got = decoded(folder, native)
    assert found == "mxfp4"
    equal_numbers(got, packed.fp4_library(tensors, "mxfp4").float().numpy())


@pytest.mark.parametrize("whole", [0.25, 3584.0, 1234.5678])
def test_nvfp4_is_compressed_tensors(whole: float, native: Native, tmp_path: Path) -> None:
    """Bit for bit where the divisor's inverse is exact; else that inverse is rounded once: within 2 ulp, and the same
    bfloat16 numbers but for the few that lie on a border."""
    rng = np.random.default_rng(2)
    scale = random_e4m3(rng, (FP4_SHAPE[0], FP4_SHAPE[1] // 16))
    divisor = torch.tensor([whole])
    tensors = {"weight_packed": random_fp4(rng), "weight_scale": scale, "weight_global_scale": divisor}
    folder = write(tmp_path, tensors, packed.config(packed.fp4_args("nvfp4"), "nvfp4-pack-quantized"))
    found, got = decoded(folder, native)
    assert found == "nvfp4"
    wanted = packed.fp4_values(tensors)
    library = packed.fp4_library(tensors, "nvfp4").float().numpy()
    if whole == 0.25:
        equal_numbers(got, wanted)
        equal_numbers(got, library)
    np.testing.assert_array_max_ulp(got, wanted, 2)
    np.testing.assert_allclose(got, library, rtol=2**-7)


def test_nvfp4_of_modelopt_multiplies(native: Native, tmp_path: Path) -> None:
    """Written out: (e4m3 * scale_2) rounded to float32, times E2M1, as ModelOpt's NVFP4QTensor.dequantize."""
    rng = np.random.default_rng(3)
    scale, whole = random_e4m3(rng, (FP4_SHAPE[0], FP4_SHAPE[1] // 16)), torch.tensor(0.00123)
    tensors = {"weight": random_fp4(rng), "weight_scale": scale, "weight_scale_2": whole}
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    found, got = decoded(write(tmp_path, tensors, quantization), native)
    assert found == "nvfp4"
    codes = packed.unpack_fp4_from_uint8(tensors["weight"], *FP4_SHAPE, torch.float32)
    wanted = codes.reshape(FP4_SHAPE[0], -1, 16) * (scale.float() * whole)[..., None]
    equal_numbers(got, wanted.reshape(FP4_SHAPE).numpy())


def test_fp8_of_modelopt(native: Native, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    codes, scale = random_e4m3(rng, (64, 256)), torch.tensor(0.0123)
    quantization = {"producer": {}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    folder = write(tmp_path, {"weight": codes, "weight_scale": scale}, {"quant_method": "modelopt", **quantization})
    found, got = decoded(folder, native)
    assert found == "fp8"
    same(got, (codes.float() * scale).numpy())


def test_experts_of_gpt_oss_are_transformers(native: Native, tmp_path: Path) -> None:
    """A stack of matrices, one below the other; rows are outputs, where transformers turns them round."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(6)
    experts, rows, groups = 3, 334, 101  # 101,202 blocks
    blocks = torch.from_numpy(rng.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(2, 253, (experts, rows, groups), dtype=np.uint8))
    tensors = {"weight_blocks": blocks, "weight_scales": scales}
    folder = write(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    found, got = decoded(folder, native)
    assert found == "mxfp4"
    wanted = convert_moe_packed_tensors(blocks, scales).float().transpose(1, 2)
    equal_numbers(got, wanted.reshape(experts * rows, -1).numpy())


@pytest.mark.parametrize("kind", ["fp4 experts", "fp8", "fp8 as floats"])
def test_deepseek_v4_is_transformers(kind: str, native: Native, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rng = np.random.default_rng(8)
    four = kind == "fp4 experts"
    codes = random_fp4(rng).view(torch.int8) if four else random_e4m3(rng, (384, 8576))
    places = (FP4_SHAPE[0], FP4_SHAPE[1] // 32) if four else (3, 67)
    exponents = torch.from_numpy(rng.integers(100, 150, places, dtype=np.uint8))
    scale = exponents.view(torch.float8_e8m0fnu)
    tensors = {"weight": codes, "scale": scale.float() if kind == "fp8 as floats" else scale}
    settings = {"weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    found, got = decoded(write(tmp_path, tensors, {"quant_method": "fp8", **settings}), native)
    assert found == ("mxfp4" if four else "fp8_block128")
    wanted = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    equal_numbers(got, wanted.numpy())


def write_gguf(folder: Path, kind: str, data: npt.NDArray[np.uint8], scale: Floats | None = None) -> Path:
    """A GGUF of the tensor m.weight and, where it has one, its scale."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_tensor("m.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    if scale is not None:
        writer.add_tensor("m.scale", scale)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


@pytest.mark.parametrize("whole", [None, (1,), (3,)])
def test_nvfp4_of_gguf_is_gguf_py(whole: tuple[int, ...] | None, native: Native, tmp_path: Path) -> None:
    """A stack of three; without a scale, under one, and under one for each matrix. 100,800 blocks of 32."""
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (3, 400, 42, 36), dtype=np.uint8)
    data[..., :4] = np.where((data[..., :4] & 127) == 127, 8, data[..., :4] & 127)
    scale = np.ones(1, np.float32) if whole is None else rng.uniform(1, 2, whole).astype(np.float32)
    folder = write_gguf(tmp_path, "NVFP4", data.reshape(3, 400, -1), None if whole is None else scale)
    found, got = decoded(folder, native)
    assert found == "nvfp4"
    plain = gguf.quants.dequantize(data.reshape(1200, -1), gguf.GGMLQuantizationType.NVFP4).reshape(len(scale), -1)
    if whole is None:
        equal_numbers(got, plain.reshape(1200, -1))
    np.testing.assert_allclose(got, (plain * scale[:, None].astype(np.float64)).reshape(1200, -1), rtol=2e-7)


def test_a_gguf_type_without_a_format_is_read_as_floats(native: Native, tmp_path: Path) -> None:
    data = np.random.default_rng(5).integers(0, 256, (3, 40, 2 * 110), dtype=np.uint8)
    data.reshape(-1, 110)[:, 1] &= 0x3F  # finite scales
    found, got = decoded(write_gguf(tmp_path, "IQ3_S", data), native)
    assert found == "f32"
    same(got, gguf.quants.dequantize(data.reshape(120, -1), gguf.GGMLQuantizationType.IQ3_S))


def test_a_scale_of_nvfp4_in_gguf_that_fits_no_stack(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "NVFP4", np.zeros((3, 8, 36), np.uint8), np.ones(2, np.float32))
    with pytest.raises(TapeoutError, match=r"'m\.scale' is f32 \[2\]; the scale of NVFP4 is one f32, or one for each"):
        weights_of(open_checkpoint(path)).find("m.weight")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_conversion_in_strips_is_that_of_the_whole(name: str, native: Native, tmp_path: Path) -> None:
    """The scale of the tensor is found first, and the error that is counted is that of the bytes."""
    values = (np.random.default_rng(1).standard_t(4, (200, 96)) * 0.02).astype(np.float32)
    folder = packed.write(tmp_path, {"m.weight": torch.from_numpy(values)}, {})
    checkpoint = open_checkpoint(folder)
    recipe = weights_of(checkpoint).find("m.weight")
    assert recipe is not None
    evaluator, errors = Evaluator(checkpoint, native), ErrorSums()
    strips = [evaluator.rows(Convert(recipe, name), at, min(at + 37, 200), errors) for at in range(0, 200, 37)]
    form = FORMATS[name]
    assert form.encode is not None
    np.testing.assert_array_equal(np.concatenate(strips), form.encode(values))
    residual = form.decode(np.concatenate(strips)).astype(np.float64) - values
    np.testing.assert_allclose(errors.sums[0], (residual**2).sum(), rtol=1e-6)
    assert errors.lossy and errors.sums[2] == np.abs(residual.astype(np.float32)).max()
