"""Four-bit floats (E2M1) in blocks: mxfp4 under powers of two, nvfp4 under e4m3 scales and one float32 scale.

E2M1 codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. ``Codes.table`` holds their doubles, which are whole.
In both, nibbles lie as in Q4_0: the low one of byte j is element j of 32, the high one element j + 16.

mxfp4 is GGUF's (OCP Microscaling Formats, MXFP4): for each 32 elements an E8M0 byte e, ``value = 2^(e - 127) * E2M1``.
e = 255 is NaN, e = 0 is 2^-127, which float32 holds as a subnormal.

nvfp4 is for each 32 elements a float32 g, two e4m3 scales s of 16 elements, and 16 bytes of nibbles:
``value = (s * g) * E2M1``, each product rounded to float32. g stands for the one scale that files have a tensor, as a
multiplier, whichever way they store it; every block carries it, so matrices with different ones lie one below the other
without a change to any value, and layouts keep it once a row (``Format.row_scale``).
"""

from __future__ import annotations

import numpy as np

from tapeout.compiler.formats.affine import blocks_of, check_finite, decoder, fields, flat
from tapeout.compiler.formats.base import Bytes, Codes, Floats, Format
from tapeout.compiler.formats.fp8 import e4m3_values, to_e4m3

BLOCK = 32
GROUP = 16
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each code."""
NVFP4_HEAD = 4 + BLOCK // GROUP
E2M1_LARGEST = np.float32(6)
E4M3_LARGEST = np.float32(448)
_SMALLEST_SCALE = np.finfo(np.float32).tiny


def e8m0_halves(exponents: Bytes) -> Floats:
    """2^(e - 128) for each byte e, half of what it stands for; NaN for 255."""
    bits = exponents.astype(np.uint32)
    normal = (np.maximum(bits, 1) - np.uint32(1)) << np.uint32(23)
    subnormal = np.uint32(0x00200000) << np.minimum(bits, 1)
    value = np.where(bits < 2, subnormal, normal).view(np.float32)
    return np.where(bits == 255, np.float32(np.nan), value)


def e8m0_bytes(halves: Floats) -> Bytes:
    """The inverse of ``e8m0_halves``."""
    bits = halves.view(np.uint32)
    exponent = np.where(bits < 0x00800000, bits >> np.uint32(22), (bits >> np.uint32(23)) + np.uint32(1))
    return np.where(np.isnan(halves), 255, exponent).astype(np.uint8)


def to_e2m1(value: Floats) -> Bytes:
    """The codes nearest to float32 values, ties to even; what lies beyond 6 becomes 6."""
    magnitude = np.abs(value)
    code = np.signbit(value).astype(np.uint8) << np.uint8(3)
    for border in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > np.float32(border)
    for border in (0.75, 1.75, 3.5):  # what lies in the middle goes up to an even code
        code += magnitude >= np.float32(border)
    return code


def pack_halves(codes: Bytes) -> Bytes:
    """Codes [..., 32] as 16 bytes."""
    return codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << np.uint8(4))


def nibbles(packed: Bytes) -> Bytes:
    """The inverse of ``pack_halves``: [..., 16] as [..., 32]."""
    return fields(packed, (0, 4), 15).reshape(*packed.shape[:-1], BLOCK)


def _codes_mxfp4(data: Bytes) -> Codes:
    blocks = blocks_of(data, 17)
    d = e8m0_halves(blocks[..., 0])
    return Codes(4, BLOCK, BLOCK, 0, flat(nibbles(blocks[..., 1:])), d, d_type="e8m0", table=E2M1)


def _codes_nvfp4(data: Bytes) -> Codes:
    blocks = blocks_of(data, NVFP4_HEAD + BLOCK // 2)
    d = np.ascontiguousarray(blocks[..., :4]).view("<f4")[..., 0] * np.float32(0.5)
    sub = e4m3_values().astype(np.float16)[flat(np.ascontiguousarray(blocks[..., 4:NVFP4_HEAD]))]
    codes = flat(nibbles(blocks[..., NVFP4_HEAD:]))
    return Codes(4, GROUP, BLOCK, 0, codes, d, sub, d_type="f32", table=E2M1, sub_type="e4m3")


def _encode_mxfp4(data: Floats) -> Bytes:
    """Under the power of two that brings the largest magnitude into [4, 8) (OCP Microscaling Formats, 6.3)."""
    check_finite(data)
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1)
    exponent = (largest.view(np.uint32) >> np.uint32(23)).astype(np.int32) - 2
    exponents = np.maximum(exponent, 0).astype(np.uint8)
    factor = ((np.uint32(254) - exponents.astype(np.uint32)) << np.uint32(23)).view(np.float32)
    codes = to_e2m1(blocks * factor[..., None])
    return flat(np.concatenate((exponents[..., None], pack_halves(codes)), axis=-1))


def nvfp4_global(largest: np.float32 | float) -> np.float32:
    """The scale of a tensor under which its largest magnitude is 448 times 6."""
    return max(np.float32(largest) / (E4M3_LARGEST * E2M1_LARGEST), _SMALLEST_SCALE)


def encode_nvfp4(data: Floats, largest: np.float32 | float) -> Bytes:
    """Rows [N, bytes] of values [N, K] of a tensor of this largest magnitude."""
    check_finite(data)
    scale = nvfp4_global(largest)
    groups = np.ascontiguousarray(data).reshape(len(data), -1, BLOCK // GROUP, GROUP)
    scales = to_e4m3(np.abs(groups).max(axis=-1) / E2M1_LARGEST / scale)
    step = (e4m3_values()[scales] * scale)[..., None]
    codes = to_e2m1(np.divide(groups, step, out=np.zeros_like(groups), where=step > 0))
    head = np.broadcast_to(scale.astype("<f4"), groups.shape[:2])[..., None].copy().view(np.uint8)
    return flat(np.concatenate((head, scales, pack_halves(codes.reshape(*groups.shape[:2], BLOCK))), axis=-1))


def _encode_nvfp4(data: Floats) -> Bytes:
    return encode_nvfp4(data, np.abs(data).max(initial=0))


FP4: dict[str, Format] = {
    "mxfp4": Format("mxfp4", BLOCK, 17, decoder(_codes_mxfp4), _encode_mxfp4, _codes_mxfp4, gguf_id=39),
    "nvfp4": Format(
        "nvfp4",
        BLOCK,
        NVFP4_HEAD + BLOCK // 2,
        decoder(_codes_nvfp4),
        _encode_nvfp4,
        _codes_nvfp4,
        own_number=211,
        row_scale=True,
    ),
}
