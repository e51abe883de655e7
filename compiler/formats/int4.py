"""Four-bit integers in groups along K under one scale: int4_g32, int4_g64, int4_g128, with zero points also _zp.

``value = d * (code - zero)``, code 0..15; zero is 8, or in the _zp formats an integer 0..15 of the group. d is
bfloat16; in the _f16 formats, which are read and not written, float16. These are the numbers of compressed-tensors'
pack-quantized checkpoints, of GPTQ and of AWQ. A block is one group: d, the zero where there is one, then for each 32
elements 16 bytes as in Q4_0 (low nibbles are elements 0..15, high nibbles 16..31), which is itself the format of groups
under a float16 scale without zero points.

Encoding searches the scale of least squared error: a grid of ranges, each followed by least squares, refined twice,
then the bfloat16 neighbours of the best. ``emit/quantize_int4.c`` is the same search, operation for operation: sums
run in eight lanes along the group, which are then added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from tapeout.compiler.formats.affine import blocks_of, check_finite, decoder, flat, half
from tapeout.compiler.formats.base import Bytes, Codes, Floats, Format

LIMIT = 2.0**60
"""The largest magnitude that is taken: squares of 128 of them times 15 stay within float32."""
_LANES = 8
_CHUNK = 4096
_f = np.float32


def _codes(data: Bytes, group: int, zeros: bool, d_type: Literal["f16", "bf16"]) -> Codes:
    head = 3 if zeros else 2
    blocks = blocks_of(data, head + group // 2)
    packed = blocks[..., head:].reshape(*blocks.shape[:2], group // 32, 1, 16)
    nibbles = np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=-2)
    upper = np.ascontiguousarray(blocks[..., :2]).view("<u2")[..., 0].astype(np.uint32)
    d = half(blocks, 0) if d_type == "f16" else (upper << np.uint32(16)).view(np.float32)
    own = np.ascontiguousarray(blocks[..., 2]) if zeros else None
    return Codes(4, group, group, 0 if zeros else 8, flat(nibbles), d, zeros=own, d_type=d_type)


def _encode(data: Floats, group: int, zeros: bool) -> Bytes:
    check_finite(data)
    if np.abs(data).max(initial=0) > LIMIT:
        raise ValueError(f"the value {np.abs(data).max():g} is too large for int4, whose largest is {LIMIT:g}")
    groups = np.ascontiguousarray(data).reshape(-1, group // _LANES, _LANES)
    pieces = [_encode_groups(groups[at : at + _CHUNK], zeros) for at in range(0, len(groups), _CHUNK)]
    return np.concatenate(pieces).reshape(data.shape[0], -1)


def _encode_groups(x: Floats, zeros: bool) -> Bytes:
    """Blocks [B, bytes] of groups [B, group / 8, 8]."""
    d, zero = _fit_affine(x) if zeros else _fit_symmetric(x)
    d = _best_neighbour(x, d, zero)
    codes = (_integers(x, _inverse(d), zero) + zero[:, None, None]).astype(np.uint8).reshape(len(x), -1, 2, 16)
    nibbles = (codes[:, :, 0] | (codes[:, :, 1] << np.uint8(4))).reshape(len(x), -1)
    head = (d.view(np.uint32) >> np.uint32(16)).astype("<u2")[:, None].view(np.uint8)
    own = [zero.astype(np.uint8)[:, None]] if zeros else []
    return np.concatenate([head, *own, nibbles], axis=1)


def _fit_symmetric(x: Floats) -> tuple[Floats, Floats]:
    """Scales of either sign: grids that put the element of largest magnitude near code -8 and near code 7."""
    elements = x.reshape(len(x), -1)
    peak = np.take_along_axis(elements, np.abs(elements).argmax(axis=1)[:, None], axis=1)[:, 0]
    zero = np.full_like(peak, 8)
    state = (np.zeros_like(peak), np.zeros_like(peak))
    for c in range(9):
        stretch = -1.25 + 0.25 * c
        state = _improve(x, zero, _ratio(_f(-8 + stretch), peak), state)
        state = _improve(x, zero, _ratio(_f(7 - stretch), peak), state)
    for _ in range(2):
        state = _improve(x, zero, _ratio(_f(1), state[0]), state)
    return state[0], zero


def _fit_affine(x: Floats) -> tuple[Floats, Floats]:
    """Scales >= 0 and zeros: a grid of ranges, each with the two integers next to where the smallest element goes."""
    elements = x.reshape(len(x), -1)
    low = np.minimum(elements.min(axis=1), _f(0))
    span = np.maximum(elements.max(axis=1), _f(0)) - low
    zero: Floats = np.zeros_like(low)
    scale, best = np.zeros_like(low), np.zeros_like(low)
    for c in range(11):
        factor = _ratio(_f(13 + 0.25 * c), span)
        start = np.floor((_f(0) - low) * factor)
        for step in (0, 1):
            tried: Floats = np.minimum(start + _f(step), _f(15))
            new, explained = _improve(x, tried, factor, (scale, best))
            zero = np.where(np.greater(explained, best), tried, zero)
            scale, best = new, explained
    for _ in range(2):
        scale, best = _improve(x, zero, _ratio(_f(1), scale), (scale, best))
    return scale, zero


def _improve(x: Floats, zero: Floats, factor: Floats, state: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Least squares under the codes that ``factor`` gives; ``state`` is (scale, squares explained)."""
    q = _integers(x, factor, zero)
    sqx = _sum(q * x)
    slope = _ratio(sqx, _sum(q * q))
    explained: Floats = slope * sqx
    better = explained > state[1]
    return np.where(better, slope, state[0]), np.where(better, explained, state[1])


def _best_neighbour(x: Floats, scale: Floats, zero: Floats) -> Floats:
    """The bfloat16 value of least error among the nearest to ``scale`` and its two neighbours."""
    word = scale.view(np.uint32)
    nearest = (word + (np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    chosen, least = np.zeros_like(scale), np.full_like(scale, np.inf)
    for step in (0, -1, 1):
        moved = np.where((nearest & np.uint32(0x7FFF)) > 0, nearest + np.uint32(step & 0xFFFFFFFF), nearest)
        d = (moved << np.uint32(16)).view(np.float32)
        residual: Floats = np.subtract(x, d[:, None, None] * _integers(x, _inverse(d), zero))
        error = _sum(residual * residual)
        better = error < least
        chosen, least = np.where(better, d, chosen), np.where(better, error, least)
    return chosen


def _integers(x: Floats, factor: Floats, zero: Floats) -> Floats:
    """code - zero of every element, as float32."""
    low = (_f(0) - zero)[:, None, None]
    clipped: Floats = np.maximum(np.minimum(x * factor[:, None, None], low + _f(15)), low)
    return np.rint(clipped)


def _inverse(scale: Floats) -> Floats:
    return _ratio(_f(1), scale)


def _ratio(numerator: Floats | np.float32, denominator: Floats) -> Floats:
    """numerator / denominator, or 0 where the denominator's magnitude is not above 1e-30."""
    good = np.abs(denominator) > _f(1e-30)
    return np.where(good, numerator / np.where(good, denominator, _f(1)), _f(0))


def _sum(terms: Floats) -> Floats:
    """Sums over groups [B, steps, 8]: each lane in order, then lanes 0 + 4, 1 + 5, ... in order."""
    lanes = terms[:, 0].copy()
    for step in range(1, terms.shape[1]):
        lanes += terms[:, step]
    four = lanes[:, :4] + lanes[:, 4:]
    two = four[:, :2] + four[:, 2:]
    return np.add(two[:, 0], two[:, 1])


def _format(name: str, number: int, group: int) -> Format:
    zeros = "_zp" in name
    d_type: Literal["f16", "bf16"] = "f16" if name.endswith("_f16") else "bf16"

    def codes(data: Bytes) -> Codes:
        return _codes(data, group, zeros, d_type)

    def encode(data: Floats) -> Bytes:
        return _encode(data, group, zeros)

    decode: Callable[[Bytes], Floats] = decoder(codes)
    nbytes = 2 + zeros + group // 2
    return Format(name, group, nbytes, decode, encode if d_type == "bf16" else None, codes, own_number=number)


INT4: dict[str, Format] = {
    "int4_g32": _format("int4_g32", 201, 32),
    "int4_g64": _format("int4_g64", 202, 64),
    "int4_g128": _format("int4_g128", 203, 128),
    "int4_g32_zp": _format("int4_g32_zp", 207, 32),
    "int4_g64_zp": _format("int4_g64_zp", 208, 64),
    "int4_g128_zp": _format("int4_g128_zp", 204, 128),
    "int4_g32_zp_f16": _format("int4_g32_zp_f16", 209, 32),
    "int4_g128_zp_f16": _format("int4_g128_zp_f16", 210, 128),
}
