"""Blocks of 32 with one scale (and one minimum): Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Layouts and rounding are those of gguf-py's ``quants.py``. Nibbles are split by halves: the low nibble of byte j is
element j, the high nibble element j + 16.
"""

from __future__ import annotations

import numpy as np

from tapeout.compiler.formats.affine import blocks_of, check_finite, decoder, fields, flat, half, half_bytes
from tapeout.compiler.formats.base import Bytes, Codes, Floats, Format

BLOCK = 32


def _nibbles(packed: Bytes) -> Bytes:
    return fields(packed, (0, 4), 15).reshape(*packed.shape[:-1], BLOCK)


def _fifth_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _codes_q4_0(data: Bytes) -> Codes:
    blocks = blocks_of(data, 18)
    return Codes(4, BLOCK, BLOCK, 8, flat(_nibbles(blocks[..., 2:])), half(blocks, 0))


def _codes_q4_1(data: Bytes) -> Codes:
    blocks = blocks_of(data, 20)
    codes = flat(_nibbles(blocks[..., 4:]))
    return Codes(4, BLOCK, BLOCK, 0, codes, half(blocks, 0), dmin=half(blocks, 2), negate_min=True)


def _codes_q5_0(data: Bytes) -> Codes:
    blocks = blocks_of(data, 22)
    codes = flat(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]))
    return Codes(5, BLOCK, BLOCK, 16, codes, half(blocks, 0))


def _codes_q5_1(data: Bytes) -> Codes:
    blocks = blocks_of(data, 24)
    codes = flat(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]))
    return Codes(5, BLOCK, BLOCK, 0, codes, half(blocks, 0), dmin=half(blocks, 2), negate_min=True)


def _codes_q8_0(data: Bytes) -> Codes:
    blocks = blocks_of(data, 34)
    codes = flat(blocks[..., 2:] ^ np.uint8(128))
    return Codes(8, BLOCK, BLOCK, 128, codes, half(blocks, 0))


def _blocks(data: Floats) -> Floats:
    check_finite(data)
    return np.ascontiguousarray(data).reshape(data.shape[0], -1, BLOCK)


def _inverse(scale: Floats) -> Floats:
    """1 / scale, or 0 where that is not finite: such a scale is zero in float16 and its codes have no meaning."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _pack(codes: Bytes, bits: int) -> tuple[Bytes, ...]:
    """The fifth bits (when there are any), then the nibbles, of codes [rows, blocks, 32]."""
    low = codes & np.uint8(15)
    nibbles = low[..., :16] | (low[..., 16:] << np.uint8(4))
    if bits == 4:
        return (nibbles,)
    return np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little"), nibbles


def _encode_symmetric(data: Floats, bits: int) -> Bytes:
    """Q4_0 and Q5_0: the element of largest magnitude takes the lowest code exactly."""
    blocks = _blocks(data)
    zero = 1 << (bits - 1)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    scale = largest / np.float32(-zero)
    shifted = blocks * _inverse(scale) + np.float32(zero + 0.5)
    codes = shifted.astype(np.uint8).clip(0, 2 * zero - 1)
    parts = (half_bytes(scale[..., 0], f"q{bits}_0"), *_pack(codes, bits))
    return flat(np.concatenate(parts, axis=-1))


def _encode_affine(data: Floats, bits: int) -> Bytes:
    """Q4_1 and Q5_1: the smallest element takes code 0, the largest the highest code."""
    blocks = _blocks(data) + np.float32(0)  # -0 and 0 are equal to a minimum and a maximum: keep one of them
    top = (1 << bits) - 1
    low = blocks.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        scale = (blocks.max(axis=-1, keepdims=True) - low) / np.float32(top)
        heads = (half_bytes(scale[..., 0], f"q{bits}_1"), half_bytes(low[..., 0], f"q{bits}_1"))
    codes = ((blocks - low) * _inverse(scale) + np.float32(0.5)).astype(np.uint8).clip(0, top)
    return flat(np.concatenate((*heads, *_pack(codes, bits)), axis=-1))


def _encode_q8_0(data: Floats) -> Bytes:
    blocks = _blocks(data)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    magnitude = np.abs(scaled)
    floor = np.floor(magnitude)
    codes = np.copysign(floor + (magnitude - floor >= np.float32(0.5)), scaled).astype(np.int8)
    return flat(np.concatenate((half_bytes(scale[..., 0], "q8_0"), codes.view(np.uint8)), axis=-1))


def _four_bit_symmetric(data: Floats) -> Bytes:
    return _encode_symmetric(data, 4)


def _four_bit_affine(data: Floats) -> Bytes:
    return _encode_affine(data, 4)


def _five_bit_symmetric(data: Floats) -> Bytes:
    return _encode_symmetric(data, 5)


def _five_bit_affine(data: Floats) -> Bytes:
    return _encode_affine(data, 5)


LEGACY: dict[str, Format] = {
    "q4_0": Format("q4_0", BLOCK, 18, decoder(_codes_q4_0), _four_bit_symmetric, _codes_q4_0, gguf_id=2),
    "q4_1": Format("q4_1", BLOCK, 20, decoder(_codes_q4_1), _four_bit_affine, _codes_q4_1, gguf_id=3),
    "q5_0": Format("q5_0", BLOCK, 22, decoder(_codes_q5_0), _five_bit_symmetric, _codes_q5_0, gguf_id=6),
    "q5_1": Format("q5_1", BLOCK, 24, decoder(_codes_q5_1), _five_bit_affine, _codes_q5_1, gguf_id=7),
    "q8_0": Format("q8_0", BLOCK, 34, decoder(_codes_q8_0), _encode_q8_0, _codes_q8_0, gguf_id=8),
}
