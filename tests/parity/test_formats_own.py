"""int4, int8, fp8 and fp4 against torch, ml_dtypes and formulas in float64; the error of what the quantizers choose."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from tapeout.compiler.formats import FORMATS, Format
from tapeout.compiler.formats.fp4 import e8m0_bytes, e8m0_halves, to_e2m1
from tapeout.compiler.formats.fp8 import e4m3_values, to_e4m3

Array = npt.NDArray[np.float32]
INT4 = {"int4_g32": 32, "int4_g64": 64, "int4_g128": 128, "int4_g32_zp": 32, "int4_g64_zp": 64, "int4_g128_zp": 128}
READ = {"int4_g32_zp_f16": 32, "int4_g128_zp_f16": 128}


def encoded(form: Format, data: Array) -> npt.NDArray[np.uint8]:
    assert form.encode is not None
    return form.encode(data)


def weights(kind: str) -> Array:
    rng = np.random.default_rng(5)
    shape = (96, 1024)
    data = {
        "gaussian": lambda: rng.normal(size=shape) * 0.02,
        "heavy tails": lambda: rng.standard_t(3, size=shape) * 0.02,
        "one sign": lambda: np.abs(rng.normal(size=shape)) * 0.1,
        "shifted": lambda: rng.normal(size=shape) * 0.02 + 0.03,
    }
    return data[kind]().astype(np.float32)


def test_every_e4m3_code_is_torch_s() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(e4m3_values()[finite].view(np.uint32), expected[finite].view(np.uint32))


def test_e4m3_rounds_as_torch() -> None:
    rng = np.random.default_rng(0)
    codes = e4m3_values()[:127]
    middles = (codes[1:] + codes[:-1]) / 2
    value = np.concatenate(
        [
            rng.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32),
            (rng.normal(size=500_000) * 10.0 ** rng.uniform(-5, 3, 500_000)).astype(np.float32),
            *(np.nextafter(middles, np.float32(to)) * sign for to in (-1e9, 1e9) for sign in (1, -1)),
            *(middles * sign for sign in (1, -1)),
            np.array([0.0, -0.0, 448, 464, 465, 3e38, -3e38], np.float32),
        ]
    )
    value = value[np.isfinite(value)]
    expected = torch.from_numpy(value).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(to_e4m3(value), expected)


@pytest.mark.parametrize("kind", ["gaussian", "heavy tails", "one sign", "shifted"])
def test_fp8_is_absmax_over_448_of_a_tensor_a_block_or_a_row(kind: str) -> None:
    data = weights(kind)[:, :672]
    data = np.concatenate((data, data[::-1] * np.float32(3)))
    for name, rows, wide in (("fp8", 1 << 20, 1 << 20), ("fp8_block128", 128, 128), ("fp8_row", 1, 1 << 20)):
        got = FORMATS[name].decode(encoded(FORMATS[name], data))
        for row in range(0, len(data), rows):
            for k in range(0, data.shape[1], wide):
                x = data[row : row + rows, k : k + wide]
                scale = np.float32(np.abs(x).max() / np.float32(448))
                wanted = torch.from_numpy(x / scale).to(torch.float8_e4m3fn).float().numpy() * scale
                np.testing.assert_array_equal(got[row : row + rows, k : k + wide], wanted)


@pytest.mark.parametrize("name", [*INT4, *READ])
def test_int4_decodes_by_the_formula(name: str) -> None:
    """Own reading of the block: scale, zero or 8, nibbles split by halves of 32; exact in float64."""
    group, zeros = {**INT4, **READ}[name], "_zp" in name
    rng = np.random.default_rng(9)
    head = 3 if zeros else 2
    blocks = rng.integers(0, 256, (200, 4, head + group // 2), dtype=np.uint8)
    scale = torch.from_numpy(rng.normal(size=(200, 4)) * 10.0 ** rng.uniform(-6, 2, (200, 4)))
    scale = scale.to(torch.float16 if name.endswith("f16") else torch.bfloat16)
    blocks[..., :2] = scale.view(torch.int16).numpy().view(np.uint8).reshape(200, 4, 2)
    expected = np.zeros((200, 4, group))
    for element in range(group):
        byte = blocks[..., head + element // 32 * 16 + element % 16]
        code = (byte >> (4 if element % 32 >= 16 else 0) & 15).astype(np.int64)
        zero = blocks[..., 2].astype(np.int64) if zeros else 8
        expected[..., element] = (code - zero) * scale.double().numpy()
    got = FORMATS[name].decode(blocks.reshape(200, -1))
    np.testing.assert_array_equal(got, expected.reshape(200, -1).astype(np.float32))
    np.testing.assert_array_equal(got.astype(np.float64), expected.reshape(200, -1))


@pytest.mark.parametrize("group", [32, 128])
def test_int8_decodes_by_the_formula(group: int) -> None:
    rng = np.random.default_rng(4)
    codes = rng.integers(-128, 128, (100, 8, group)).astype(np.int8)
    scale = torch.from_numpy(rng.normal(size=(100, 8, 1)) * 10.0 ** rng.uniform(-6, 2, (100, 8, 1))).to(torch.bfloat16)
    blocks = np.concatenate((scale.view(torch.int16).numpy().view(np.uint8), codes.view(np.uint8)), axis=-1)
    got = FORMATS[f"int8_g{group}"].decode(blocks.reshape(100, -1))
    np.testing.assert_array_equal(got.astype(np.float64), (codes * scale.double().numpy()).reshape(100, -1))


# ---- fp4 ---------------------------------------------------------------------------------------------------------


def test_e2m1_rounds_as_ml_dtypes() -> None:
    """Ties to even on every border, on both sides of each, and at random."""
    rng = np.random.default_rng(2)
    borders = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    value = np.concatenate(
        [
            (rng.normal(size=500_000) * 10.0 ** rng.uniform(-5, 2, 500_000)).astype(np.float32),
            *(np.nextafter(borders, np.float32(to)) * sign for to in (-1e9, 1e9) for sign in (1, -1)),
            *(borders * sign for sign in (1, -1)),
            np.array([0.0, -0.0, 1e-30, -1e-30, 7, 3e38, -3e38], np.float32),
        ]
    )
    np.testing.assert_array_equal(to_e2m1(value), value.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
    np.testing.assert_array_equal(to_e2m1(borders), [0, 2, 2, 4, 4, 6, 6])


def test_every_e8m0_byte_is_torch_s() -> None:
    code = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(code).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(e8m0_halves(code) * np.float32(2), expected)
    np.testing.assert_array_equal(e8m0_halves(code)[:-1], np.ldexp(1.0, np.arange(255) - 128))
    np.testing.assert_array_equal(e8m0_bytes(e8m0_halves(code)), code)


@pytest.mark.parametrize("kind", ["gaussian", "heavy tails", "one sign"])
def test_mxfp4_has_gguf_s_exponents_and_the_nearest_codes(kind: str) -> None:
    data = weights(kind)
    data[3] = 0
    blocks = encoded(FORMATS["mxfp4"], data).reshape(-1, 17)
    theirs = gguf.quants.quantize(data, gguf.GGMLQuantizationType.MXFP4).reshape(-1, 17)
    np.testing.assert_array_equal(blocks[:, 0], theirs[:, 0])
    step = np.ldexp(1.0, blocks[:, :1].astype(int) - 127)
    wanted = (data.reshape(-1, 32) / step).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * step
    np.testing.assert_array_equal(FORMATS["mxfp4"].decode(blocks), wanted)


@pytest.mark.parametrize("kind", ["gaussian", "heavy tails", "one sign"])
def test_nvfp4_is_absmax_over_448_and_6(kind: str) -> None:
    """The scale of the tensor, e4m3 scales as torch rounds them, and the nearest code under both."""
    data = weights(kind)
    data[3] = 0
    whole = torch.from_numpy(data).abs().max() / (448 * 6)
    x = torch.from_numpy(data).reshape(len(data), -1, 16)
    scale = (x.abs().amax(-1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    codes = torch.where(scale > 0, x / scale, 0).numpy().astype(ml_dtypes.float4_e2m1fn)
    wanted = (codes.astype(np.float32) * scale.numpy()).reshape(len(data), -1)
    np.testing.assert_array_equal(FORMATS["nvfp4"].decode(encoded(FORMATS["nvfp4"], data)), wanted)


def error(name: str, data: Array) -> float:
    residual = (FORMATS[name].decode(encoded(FORMATS[name], data)) - data).astype(np.float64)
    return float(np.sqrt((residual**2).sum() / (data.astype(np.float64) ** 2).sum()))


def plain_error(data: Array, group: int) -> float:
    """absmax / 7 rounded to bfloat16, codes rounded to nearest: what most writers of these checkpoints do."""
    x = torch.from_numpy(data.reshape(-1, group)).double()
    scale = (x.abs().amax(dim=1, keepdim=True) / 7).to(torch.bfloat16).double()
    residual = x - scale * (x / scale).round().clamp(-8, 7)
    return float((residual.square().sum() / x.square().sum()).sqrt())


@pytest.mark.parametrize("kind", ["gaussian", "heavy tails"])
@pytest.mark.parametrize("name", ["int4_g32", "int4_g64", "int4_g128"])
def test_int4_beats_absmax_over_seven(name: str, kind: str) -> None:
    assert error(name, weights(kind)) < 0.87 * plain_error(weights(kind), INT4[name])


@pytest.mark.parametrize(("kind", "gain"), [("gaussian", 1.01), ("one sign", 0.6), ("shifted", 0.85)])
def test_zero_points_pay_where_weights_are_off_centre(kind: str, gain: float) -> None:
    assert error("int4_g128_zp", weights(kind)) < gain * error("int4_g128", weights(kind))


@pytest.mark.parametrize("name", [*INT4, "fp8", "fp8_block128", "fp8_row", "mxfp4", "nvfp4"])
def test_zeros_stay_zeros(name: str) -> None:
    data = np.zeros((130, 256), np.float32)
    assert not FORMATS[name].decode(encoded(FORMATS[name], data)).any()
    data[7, 5] = 0.25
    np.testing.assert_allclose(FORMATS[name].decode(encoded(FORMATS[name], data)), data, rtol=4e-3)
