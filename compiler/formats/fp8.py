"""8-bit floats (e4m3fn) under float32 scales: one a tensor (fp8), a row (fp8_row) or a 128 x 128 block (fp8_block128).

e4m3fn has 4 bits of exponent (bias 7) and 3 of mantissa, no infinity, NaN as 0x7F and 0xFF, and 448 as its largest
value; ``value = scale * e4m3``. Rounding is to nearest even, beyond 448 to 448. A row stands on its own: blocks of 32
elements carry their scale with them (4 bytes, then 32), and layout ``planes`` keeps each scale once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats.affine import blocks_of, check_finite
from tapeout.compiler.formats.base import Bytes, Floats, Format

BLOCK = 32
TILE = 128
LARGEST = np.float32(448)
_SMALLEST_SCALE = np.finfo(np.float32).tiny


def e4m3_values() -> Floats:
    """float32 value of each of the 256 codes."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    magnitude = np.where(code & 127 == 127, np.nan, magnitude)
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def to_e4m3(value: Floats) -> Bytes:
    """The e4m3fn codes nearest to float32 values, ties to even; what lies beyond 448 becomes 448."""
    word = value.view(np.uint32)
    sign = (word >> np.uint32(24)) & np.uint32(0x80)
    magnitude = np.minimum(np.abs(value), LARGEST)
    bits = magnitude.view(np.uint32)
    # normal numbers: drop 20 of the 23 bits of mantissa to nearest even, and move the bias from 127 to 7
    rounded = (bits + (np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1)))) >> np.uint32(20)
    normal = rounded.astype(np.int32) - (120 << 3)
    # below 2^-6 the step is 2^-9; the sum is rounded to even by the addition itself
    small = (magnitude + np.float32(2.0**14)).view(np.int32) - np.float32(2.0**14).view(np.int32)
    code = np.where(magnitude < np.float32(2.0**-6), small, normal).astype(np.uint32)
    return (code | sign).astype(np.uint8)


def scale_of(largest: Floats) -> Floats:
    """The scale under which a largest magnitude becomes 448."""
    return np.maximum(largest / LARGEST, _SMALLEST_SCALE)


def _decode(data: Bytes) -> Floats:
    blocks = blocks_of(data, 4 + BLOCK)
    scale = np.ascontiguousarray(blocks[..., :4]).view("<f4")
    with np.errstate(invalid="ignore", over="ignore"):
        return (e4m3_values()[blocks[..., 4:]] * scale).reshape(len(data), -1)


def encode_under(data: Floats, scale: Floats) -> Bytes:
    """Rows [N, bytes] of values [N, K] under the scale of each block of 32, [N, K / 32]."""
    check_finite(data)
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, BLOCK)
    codes = to_e4m3(blocks / scale[..., None])
    return np.concatenate((scale.astype("<f4")[..., None].view(np.uint8), codes), axis=-1).reshape(len(data), -1)


def _encode_tensor(data: Floats) -> Bytes:
    check_finite(data)
    scale = scale_of(np.abs(data).max(initial=0))
    return encode_under(data, np.full((len(data), data.shape[1] // BLOCK), scale, np.float32))


def _encode_rows(data: Floats) -> Bytes:
    check_finite(data)
    scale = scale_of(np.abs(data).max(axis=1))
    return encode_under(data, np.repeat(scale[:, None], data.shape[1] // BLOCK, axis=1))


def _encode_blocks(data: Floats) -> Bytes:
    check_finite(data)
    rows, k = data.shape
    padded: npt.NDArray[np.float32] = np.zeros((-(-rows // TILE), TILE, -(-k // TILE), TILE), np.float32)
    padded.reshape(padded.shape[0] * TILE, -1)[:rows, :k] = data
    scale = scale_of(np.abs(padded).max(axis=(1, 3)))
    spread = np.repeat(np.repeat(scale, TILE, axis=0)[:rows], TILE // BLOCK, axis=1)[:, : k // BLOCK]
    return encode_under(data, spread)


FP8: dict[str, Format] = {
    "fp8": Format("fp8", BLOCK, 4 + BLOCK, _decode, _encode_tensor, own_number=205, tiles=(0, 0)),
    "fp8_block128": Format(
        "fp8_block128", BLOCK, 4 + BLOCK, _decode, _encode_blocks, own_number=206, tiles=(TILE, TILE)
    ),
    "fp8_row": Format("fp8_row", BLOCK, 4 + BLOCK, _decode, _encode_rows, own_number=212, tiles=(1, 0)),
}
