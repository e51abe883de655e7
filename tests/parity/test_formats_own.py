"""int4 and fp8 against torch and against formulas written out in float64; the error of what the quantizers choose."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tapeout.compiler.formats import FORMATS, Format
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
def test_fp8_is_absmax_over_448_of_a_tensor_or_a_block(kind: str) -> None:
    data = weights(kind)[:, :672]
    data = np.concatenate((data, data[::-1] * np.float32(3)))
    for name, tile in (("fp8", 1 << 20), ("fp8_block128", 128)):
        got = FORMATS[name].decode(encoded(FORMATS[name], data))
        for row in range(0, len(data), tile):
            for k in range(0, data.shape[1], tile):
                x = data[row : row + tile, k : k + tile]
                scale = np.float32(np.abs(x).max() / np.float32(448))
                wanted = torch.from_numpy(x / scale).to(torch.float8_e4m3fn).float().numpy() * scale
                np.testing.assert_array_equal(got[row : row + tile, k : k + tile], wanted)


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


@pytest.mark.parametrize("name", [*INT4, "fp8", "fp8_block128"])
def test_zeros_stay_zeros(name: str) -> None:
    data = np.zeros((130, 256), np.float32)
    assert not FORMATS[name].decode(encoded(FORMATS[name], data)).any()
    data[7, 5] = 0.25
    np.testing.assert_allclose(FORMATS[name].decode(encoded(FORMATS[name], data)), data, rtol=4e-3)
