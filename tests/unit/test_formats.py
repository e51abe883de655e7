"""The format table, refusals, layouts by hand, and the C encoders against the numpy ones."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tapeout.compiler.emit.native import SOURCES
from tapeout.compiler.formats import FORMATS, by_gguf_id, by_safetensors
from tapeout.compiler.formats.fp4 import FP4
from tapeout.compiler.formats.fp8 import FP8
from tapeout.runtime.errors import TapeoutError

EMIT = Path(__file__).parents[2] / "compiler" / "emit"
WRITABLE = [name for name, form in FORMATS.items() if form.encode is not None]
Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("quantize") / "quantize.so"
    flags = ["-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    if sys.platform == "linux":
        flags += ["-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v3"]
    subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", *flags, "-o", out, *(EMIT / name for name in SOURCES)], check=True
    )
    library = ctypes.CDLL(str(out))
    for call in (library.tp_encode, library.tp_decode):
        call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        call.restype = ctypes.c_int
    return library


def c_encode(library: ctypes.CDLL, name: str, data: Array) -> tuple[int, npt.NDArray[np.uint8]]:
    form = FORMATS[name]
    out = np.zeros((data.shape[0], form.row_bytes(data.shape[1])), np.uint8)
    status = library.tp_encode(form.number, data.ctypes.data, out.ctypes.data, *data.shape)
    return status, out


def samples() -> dict[str, Array]:
    rng = np.random.default_rng(11)
    shape = (12, 512)
    gaussian = rng.normal(size=shape)
    data = {
        "gaussian": gaussian * 0.02,
        "heavy tails": rng.standard_t(2, size=shape),
        "rows of many magnitudes": gaussian * 10.0 ** rng.uniform(-44, 4, size=(12, 1)),
        "elements of many magnitudes": gaussian * 10.0 ** rng.uniform(-9, 3, size=shape),
        "zero": np.zeros(shape),
        "constant groups": np.repeat(rng.normal(size=(12, 16)), 32, axis=1),
        "positive": np.abs(gaussian) + 0.1,
        "negative": -np.abs(gaussian) - 0.1,
        "sparse with both zeros": gaussian * (rng.random(shape) < 0.02),
        "integers": rng.integers(-8, 8, size=shape),
    }
    return {kind: value.astype(np.float32) for kind, value in data.items()}


@pytest.mark.parametrize("kind", samples())
@pytest.mark.parametrize("name", WRITABLE)
def test_c_equals_numpy(library: ctypes.CDLL, name: str, kind: str) -> None:
    data = samples()[kind]
    form = FORMATS[name]
    status, encoded = c_encode(library, name, data)
    assert status == 0
    assert form.encode is not None
    np.testing.assert_array_equal(encoded, form.encode(data))


@pytest.mark.parametrize("name", FORMATS)
def test_c_decodes_as_numpy(library: ctypes.CDLL, name: str) -> None:
    form = FORMATS[name]
    data = np.random.default_rng(5).integers(0, 256, (8, 64 * form.block_bytes)).astype(np.uint8)
    expected = form.decode(data)
    out = np.zeros_like(expected)
    assert library.tp_decode(form.number, data.ctypes.data, out.ctypes.data, *out.shape) == 0
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(out.view(np.uint32)[finite], expected.view(np.uint32)[finite])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [name for name in WRITABLE if name != "f32"])
def test_not_finite_is_refused(library: ctypes.CDLL, name: str, bad: float) -> None:
    data = np.ones((2, 512), np.float32)
    data[1, 300] = bad
    encode = FORMATS[name].encode
    assert encode is not None
    with pytest.raises(ValueError, match=r"the value at \[1, 300\] is -?(nan|inf); only finite values can be encoded"):
        encode(data)
    assert c_encode(library, name, data)[0] == 3


@pytest.mark.parametrize("name", [name for name in WRITABLE if name not in ("f32", *FP8, *FP4)])
def test_too_large_is_refused(library: ctypes.CDLL, name: str) -> None:
    data = np.ones((2, 512), np.float32)
    data[1, 300] = -3.4e38
    encode = FORMATS[name].encode
    assert encode is not None
    with pytest.raises(ValueError, match=r"too large|rounds to infinity"):
        encode(data)
    assert c_encode(library, name, data)[0] == 4


def test_c_names_its_refusals(library: ctypes.CDLL) -> None:
    data = np.ones((1, 512), np.float32)
    out = np.zeros(4096, np.uint8)
    for name in FORMATS:
        if FORMATS[name].encode is None:
            assert library.tp_encode(FORMATS[name].number, data.ctypes.data, out.ctypes.data, 1, 512) == 1
    assert library.tp_encode(99, data.ctypes.data, out.ctypes.data, 1, 512) == 1
    assert library.tp_decode(99, out.ctypes.data, data.ctypes.data, 1, 512) == 1
    assert library.tp_encode(12, data.ctypes.data, out.ctypes.data, 1, 288) == 2


def test_q4_0_by_hand() -> None:
    """Values worked out by hand from the layout of ggml-common.h."""
    data = np.frombuffer(bytes.fromhex("0038f0e1d2c3b4a5968778695a4b3c2d1e0f"), np.uint8)[None]
    rising = np.arange(-4, 4, 0.5, dtype=np.float32)
    np.testing.assert_array_equal(FORMATS["q4_0"].decode(data)[0], np.concatenate([rising, rising[::-1]]))


def test_q4_k_by_hand() -> None:
    """Values worked out by hand from the layout of ggml-common.h."""
    nibbles = [(j % 16) | (((j + 3) % 16) << 4) for j in range(128)]
    scales = list(bytes.fromhex("4182C30445 86C708192A3B4C".replace(" ", "")))
    block = np.array([0x00, 0x38, 0x00, 0x34, *scales, *nibbles], np.uint8)[None]
    value = FORMATS["q4_k"].decode(block)[0]
    np.testing.assert_array_equal(value[0::32], [-1.25, 1.5, -1.75, 4, -4.25, 54.5, -12.75, 17])
    np.testing.assert_array_equal(value[1::32], [-0.75, 2.5, -0.25, 6, 8.25, 75.5, 16.75, 23])


def test_q6_k_by_hand() -> None:
    """Values worked out by hand from the layout of ggml-common.h."""
    low = [7 * j & 255 for j in range(128)]
    high = [(29 * j + 5) & 255 for j in range(64)]
    block = np.array([*low, *high, *(s & 255 for s in range(-8, 8)), 0x00, 0x38], np.uint8)[None]
    value = FORMATS["q6_k"].decode(block)[0]
    at = [0, 1, 32, 64, 96, 128, 160, 192, 224, 255]
    np.testing.assert_array_equal(value[at], [64, -28, 48, 64, 18, -0.0, -16, 24, 30, -87.5])


def test_mxfp4_by_hand() -> None:
    """GGUF's block of 2^1: the table forwards in the low nibbles, backwards in the high ones."""
    data = np.frombuffer(bytes.fromhex("80f0e1d2c3b4a5968778695a4b3c2d1e0f"), np.uint8)[None]
    table = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
    np.testing.assert_array_equal(FORMATS["mxfp4"].decode(data)[0], np.concatenate([table, table[::-1]]))


def test_nvfp4_by_hand() -> None:
    """A scale of 0.5 for all, e4m3 scales of 1 and 2^-9; every code once in each group of 16."""
    nibbles = bytes(j | j << 4 for j in range(16))
    data = np.frombuffer(bytes.fromhex("0000003f 3801") + nibbles, np.uint8)[None]
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    got = FORMATS["nvfp4"].decode(data)[0]
    np.testing.assert_array_equal(got, np.concatenate([values / 2, values * np.float32(2.0**-10)]))


@pytest.mark.parametrize(("name", "worst"), [("q4_k", 0.0707), ("q5_k", 0.03584), ("q6_k", 0.01756)])
def test_k_quants_keep_gaussian_weights(name: str, worst: float) -> None:
    """Bounds are the errors of llama.cpp on this very array (``ggml_quantize_chunk`` without an importance matrix)."""
    data = np.random.default_rng(3).normal(size=(64, 1024)).astype(np.float32)
    form = FORMATS[name]
    assert form.encode is not None
    error = form.decode(form.encode(data)) - data
    assert np.sqrt(np.mean(error**2)) < worst


def test_a_row_that_is_no_whole_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="q4_k stores blocks of 256 elements; a row of 576"):
        FORMATS["q4_k"].row_bytes(576)


def test_lookups() -> None:
    assert by_gguf_id(12).name == "q4_k"
    assert [by_safetensors(dtype) for dtype in ("BF16", "F8_E4M3", "I32")] == ["bf16", "e4m3", "i32"]
    assert {name: form.name for name, form in FORMATS.items()} == {name: name for name in FORMATS}
    assert [by_gguf_id(kind).name for kind in (20, 23, 39, 40)] == ["iq4_nl", "iq4_xs", "mxfp4", "gguf_nvfp4"]
    with pytest.raises(TapeoutError, match=r"unknown quantization type 15 in GGUF; known types: 0 \(f32\), 1 \(f16\)"):
        by_gguf_id(15)
    with pytest.raises(
        TapeoutError, match="unknown quantization type 'I16' in safetensors; known dtypes: F32, F16, BF16, F8_E4M3, I32"
    ):
        by_safetensors("I16")
