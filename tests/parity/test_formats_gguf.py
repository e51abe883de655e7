"""Decoding and encoding against gguf-py, bit for bit, on random blocks of every class of bytes and scales."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tapeout.compiler.formats import FORMATS, Carrier, Codes, Format
from tapeout.compiler.formats.iq import DECODERS, IQ

SCALES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}
"""Where the float16 scales sit in a block (formats' own layouts, from gguf-py's quants.py)."""

HALVES = {
    "normal": lambda rng, n: rng.normal(size=n).astype(np.float16).view(np.uint16),
    "subnormal": lambda rng, n: (
        rng.integers(1, 0x400, n).astype(np.uint16) | (rng.integers(0, 2, n) << 15).astype("u2")
    ),
    "negative": lambda rng, n: (-np.abs(rng.normal(size=n))).astype(np.float16).view(np.uint16),
    "zero": lambda rng, n: (rng.integers(0, 2, n) << 15).astype(np.uint16),
    "any finite": lambda rng, n: (
        rng.integers(0, 0x7C00, n).astype(np.uint16) | (rng.integers(0, 2, n) << 15).astype("u2")
    ),
}
BYTES = {
    "random": lambda rng, shape: rng.integers(0, 256, shape).astype(np.uint8),
    "constant": lambda rng, shape: np.broadcast_to(np.arange(shape[0])[:, None] & 255, shape).astype(np.uint8),
    "extreme": lambda rng, shape: rng.choice(np.array([0x00, 0x0F, 0x80, 0x7F, 0xF0, 0xFF], np.uint8), shape),
}
BLOCKS = 6720
COLUMNS = 4


def blocks_of_class(form: Format, halves: str, content: str) -> npt.NDArray[np.uint8]:
    """[rows, 4 blocks] of one class; 15 classes make 100,800 blocks a format."""
    rng = np.random.default_rng([form.gguf_id or 0, len(halves), len(content)])
    blocks = BYTES[content](rng, (BLOCKS, form.block_bytes)).copy()
    for offset in SCALES[form.name]:
        blocks[:, offset : offset + 2] = HALVES[halves](rng, BLOCKS)[:, None].astype("<u2").view(np.uint8)
    return blocks.reshape(BLOCKS // COLUMNS, -1)


def witness(form: Format, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    assert form.gguf_id is not None
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(form.gguf_id))


def rebuilt(codes: Codes) -> npt.NDArray[np.float32]:
    """The formula of ``Codes`` written out, one float32 rounding an operation."""

    def spread(d: npt.NDArray[Any], sub: npt.NDArray[Any] | None) -> npt.NDArray[np.float32]:
        wide = np.repeat(d.astype(np.float32), codes.super, axis=1)
        return wide if sub is None else wide * np.repeat(sub.astype(np.float32), codes.group, axis=1)

    whole = codes.codes.astype(np.int32) - codes.zero if codes.table is None else codes.table[codes.codes]
    value = spread(codes.d, codes.sub) * whole.astype(np.float32)
    if codes.dmin is None:
        return value
    minimum = spread(codes.dmin, codes.submin)
    return value + minimum if codes.negate_min else value - minimum


@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("content", BYTES)
@pytest.mark.parametrize("name", SCALES)
def test_decode_and_codes_equal_gguf(name: str, content: str, halves: str) -> None:
    form = FORMATS[name]
    data = blocks_of_class(form, halves, content)
    expected = witness(form, data)
    np.testing.assert_array_equal(form.decode(data).view(np.uint32), expected.view(np.uint32))
    assert form.codes is not None
    codes = form.codes(data)
    assert int(codes.codes.max()) < 1 << codes.bits
    assert codes.d.shape == (data.shape[0], expected.shape[1] // codes.super)
    np.testing.assert_array_equal(rebuilt(codes).view(np.uint32), expected.view(np.uint32))


def test_mxfp4_equals_gguf() -> None:
    """Blocks of every exponent whose values are finite; e = 255 is NaN here (OCP MX), which gguf-py reads as 2^128."""
    form = FORMATS["mxfp4"]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (BLOCKS * 15 // COLUMNS, COLUMNS * 17), dtype=np.uint8)
    data[:, ::17] = rng.integers(0, 253, (len(data), COLUMNS))
    expected = witness(form, data)
    np.testing.assert_array_equal(form.decode(data).view(np.uint32), expected.view(np.uint32))
    assert form.codes is not None
    np.testing.assert_array_equal(rebuilt(form.codes(data)).view(np.uint32), expected.view(np.uint32))
    data[:, 0] = 255
    assert np.isnan(form.decode(data)[:, :32]).all()


@pytest.mark.parametrize("carrier", IQ, ids=lambda carrier: carrier.name)
def test_types_that_are_read_as_floats_equal_gguf(carrier: Carrier) -> None:
    """Bytes of every kind, scales among them, over 100,000 blocks; what is not finite is so in both."""
    rng = np.random.default_rng(carrier.gguf_id)
    for _ in range(5):
        data = rng.integers(0, 256, (201, 100 * carrier.block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(carrier.gguf_id))
        got = DECODERS[carrier.name](data)
        finite = np.isfinite(expected)
        assert finite.mean() > 0.9
        np.testing.assert_array_equal(got[finite], expected[finite])
        assert not np.isfinite(got[~finite]).any()


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_16_bit_float_decodes_as_in_gguf(name: str) -> None:
    data = np.arange(65536, dtype="<u2").view(np.uint8).reshape(16, -1)
    np.testing.assert_array_equal(FORMATS[name].decode(data), witness(FORMATS[name], data))


@pytest.mark.parametrize("name", ["f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
@pytest.mark.parametrize("kind", ["gaussian", "heavy tails", "many magnitudes", "constant rows", "one sign", "ties"])
def test_encode_equals_gguf(name: str, kind: str) -> None:
    form = FORMATS[name]
    assert form.encode is not None and form.gguf_id is not None
    data = samples(kind)
    expected = gguf.quants.quantize(data, gguf.GGMLQuantizationType(form.gguf_id))
    np.testing.assert_array_equal(form.encode(data), expected.view(np.uint8).reshape(data.shape[0], -1))


def samples(kind: str) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(7)
    shape = (256, 512)
    data = {
        "gaussian": lambda: rng.normal(size=shape) * 0.02,
        "heavy tails": lambda: rng.standard_t(2, size=shape),
        "many magnitudes": lambda: rng.normal(size=shape) * 10.0 ** rng.uniform(-20, 4, size=(256, 1)),
        "constant rows": lambda: np.repeat(rng.normal(size=(256, 1)), 512, axis=1),
        "one sign": lambda: np.abs(rng.normal(size=shape)) + 1,
        "ties": lambda: rng.integers(-16, 17, size=shape) / 8 + 0.0625,
    }
    return data[kind]().astype(np.float32)
