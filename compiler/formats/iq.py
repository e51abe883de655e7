"""GGUF types that no kernel here takes apart, decoded to the float32 numbers they stand for: IQ1, IQ2, IQ3, TQ.

Super-blocks of 256. IQ codes name points of four or eight numbers (``grids``); most have signs apart, seven bits for
eight numbers, the eighth being their parity. TQ numbers are -1, 0 and 1. Layouts are those of gguf-py's ``quants.py``;
every product is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats import grids
from tapeout.compiler.formats.affine import blocks_of, fields, half
from tapeout.compiler.formats.base import Bytes, Carrier, Floats

SUPER = 256
_SIGNS = np.array([code | (code.bit_count() & 1) << 7 for code in range(128)], np.uint8)
_DELTA = np.float32(0.125)


def _words(blocks: Bytes, start: int, stop: int, kind: str) -> npt.NDArray[Any]:
    """Bytes [start, stop) of every block as little-endian words."""
    return np.ascontiguousarray(blocks[..., start:stop]).view(kind)


def _nibbles(data: Bytes) -> Floats:
    """Low, then high nibble of every byte."""
    return fields(data, (0, 4), 15).swapaxes(-1, -2).reshape(*data.shape[:-1], -1).astype(np.float32)


def _bits(data: Bytes) -> Bytes:
    """Every bit of bytes [..., n] as [..., 8 n], low ones first."""
    return np.unpackbits(np.ascontiguousarray(data), axis=-1, bitorder="little")


def _signed(points: Floats, signs: Bytes) -> Floats:
    """Numbers [rows, blocks, ..., width] as [rows, blocks, 256], negative where the bit of 32 bytes of signs is set."""
    numbers = points.reshape(*points.shape[:2], SUPER)
    return np.where(_bits(signs.reshape(*signs.shape[:2], SUPER // 8)), -numbers, numbers)


def _scaled(d: Floats, sub: Floats, numbers: Floats) -> Floats:
    """d [rows, blocks] times sub [rows, blocks, groups] times numbers [rows, blocks, 256], as [rows, K]."""
    with np.errstate(invalid="ignore", over="ignore"):  # checks find what is not finite
        scale = np.repeat(d[..., None] * sub, SUPER // sub.shape[-1], axis=-1)
        return (scale * numbers).reshape(len(d), -1)


def _seven_bit_signs(words: npt.NDArray[np.uint32]) -> Bytes:
    """Four sign bytes of the low 28 bits of every word."""
    return _SIGNS[words[..., None] >> np.arange(0, 28, 7).astype(np.uint32) & np.uint32(127)]


def _iq2_xxs(data: Bytes) -> Floats:
    """d, for each 32 elements four codes and a word of signs and scale."""
    blocks = blocks_of(data, 66)
    words = _words(blocks, 2, 66, "<u4")
    codes = np.ascontiguousarray(words[..., 0::2]).view(np.uint8)
    numbers = _signed(grids.IQ2_XXS[codes], _seven_bit_signs(words[..., 1::2]))
    sub = (words[..., 1::2] >> np.uint32(28)).astype(np.float32) + np.float32(0.5)
    return _scaled(half(blocks, 0).astype(np.float32), sub * np.float32(0.25), numbers)


def _iq2_xs(data: Bytes) -> Floats:
    """d, codes of nine bits under seven of signs, scales of 16 elements."""
    blocks = blocks_of(data, 74)
    words = _words(blocks, 2, 66, "<u2")
    numbers = _signed(grids.IQ2_XS[words & np.uint16(511)], _SIGNS[words >> np.uint16(9)])
    sub = (_nibbles(blocks[..., 66:]) + np.float32(0.5)) * np.float32(0.25)
    return _scaled(half(blocks, 0).astype(np.float32), sub, numbers)


def _iq2_s(data: Bytes) -> Floats:
    """d, codes, signs, two high bits of the codes, scales of 16 elements."""
    blocks = blocks_of(data, 82)
    high = fields(blocks[..., 66:74], (0, 2, 4, 6), 3).swapaxes(-1, -2).reshape(*blocks.shape[:2], 32)
    codes = blocks[..., 2:34].astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)
    sub = (_nibbles(blocks[..., 74:]) + np.float32(0.5)) * np.float32(0.25)
    return _scaled(half(blocks, 0).astype(np.float32), sub, _signed(grids.IQ2_S[codes], blocks[..., 34:66]))


def _iq3_xxs(data: Bytes) -> Floats:
    """d, codes, for each 32 elements a word of signs and scale."""
    blocks = blocks_of(data, 98)
    words = _words(blocks, 66, 98, "<u4")
    numbers = _signed(grids.IQ3_XXS[blocks[..., 2:66]], _seven_bit_signs(words))
    sub = ((words >> np.uint32(28)).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    return _scaled(half(blocks, 0).astype(np.float32), sub, numbers)


def _iq3_s(data: Bytes) -> Floats:
    """d, codes, their ninth bits, signs, scales of 32 elements."""
    blocks = blocks_of(data, 110)
    codes = blocks[..., 2:66].astype(np.uint16) | _bits(blocks[..., 66:74]).astype(np.uint16) << np.uint16(8)
    sub = _nibbles(blocks[..., 106:]) * np.float32(2) + np.float32(1)
    return _scaled(half(blocks, 0).astype(np.float32), sub, _signed(grids.IQ3_S[codes], blocks[..., 74:106]))


def _iq1_s(data: Bytes) -> Floats:
    """d, codes, for each 32 elements a word: three high bits of four codes, scale, the sign of what is added."""
    blocks = blocks_of(data, 50)
    words = _words(blocks, 34, 50, "<u2")
    high = words[..., None] >> np.arange(0, 12, 3).astype(np.uint16) & np.uint16(7)
    codes = blocks[..., 2:34] | high.reshape(*blocks.shape[:2], 32) << np.uint16(8)
    delta = np.where(words & np.uint16(0x8000), -_DELTA, _DELTA)
    sub = (words >> np.uint16(12) & np.uint16(7)).astype(np.float32) * np.float32(2) + np.float32(1)
    return _scaled(half(blocks, 0).astype(np.float32), sub, _shifted(codes, delta))


def _iq1_m(data: Bytes) -> Floats:
    """Codes, their three high bits with the sign of what is added, scales of 16 elements beside the nibbles of d."""
    blocks = blocks_of(data, 56)
    words = _words(blocks, 48, 56, "<u2")
    nibbles = (words >> np.uint16(12)) << np.arange(0, 16, 4).astype(np.uint16)
    d = np.bitwise_or.reduce(nibbles, axis=-1).astype("<u2").view("<f2").astype(np.float32)
    high = fields(blocks[..., 32:48], (0, 4), 15).swapaxes(-1, -2).reshape(*blocks.shape[:2], 32)
    codes = blocks[..., :32] | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    three = words[..., None] >> np.arange(0, 12, 3).astype(np.uint16) & np.uint16(7)
    sub = three.reshape(*blocks.shape[:2], 16).astype(np.float32) * np.float32(2) + np.float32(1)
    return _scaled(d, sub, _shifted(codes, np.where(high & np.uint8(8), -_DELTA, _DELTA)))


def _shifted(codes: npt.NDArray[np.uint16], delta: Floats) -> Floats:
    """Points of IQ1 with what is added to each of equal groups of them, [rows, blocks, 256]."""
    points = grids.IQ1[codes].reshape(*delta.shape, -1)
    return (points + delta[..., None]).reshape(*delta.shape[:2], SUPER)


def _tq1_0(data: Bytes) -> Floats:
    """Five numbers a byte: 32 bytes hold 160, 16 hold 80, four hold the last 16; then d."""
    blocks = blocks_of(data, 54)
    pieces: list[Bytes] = []
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        turned = blocks[..., None, start:stop] * 3 ** np.arange(count).astype(np.uint8)[:, None]
        pieces.append(((turned.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(*blocks.shape[:2], -1))
    return _ternary(half(blocks, 52), np.concatenate(pieces, axis=-1))


def _tq2_0(data: Bytes) -> Floats:
    """Two bits a number: number 128 n + 32 k + l sits at bits 2 k of byte 32 n + l; then d."""
    blocks = blocks_of(data, 66)
    codes = fields(blocks[..., :64].reshape(*blocks.shape[:2], 2, 32), (0, 2, 4, 6), 3)
    return _ternary(half(blocks, 64), codes.reshape(*blocks.shape[:2], SUPER))


def _ternary(d: npt.NDArray[np.float16], codes: Bytes) -> Floats:
    wide = d.astype(np.float32)
    return _scaled(wide, np.ones_like(wide)[..., None], codes.astype(np.float32) - np.float32(1))


DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq3_xxs": _iq3_xxs,
    "iq1_s": _iq1_s,
    "iq3_s": _iq3_s,
    "iq2_s": _iq2_s,
    "iq1_m": _iq1_m,
    "tq1_0": _tq1_0,
    "tq2_0": _tq2_0,
}
"""float32 [rows, K] of rows of bytes, by the name of the carrier."""
IQ: tuple[Carrier, ...] = (
    Carrier("iq2_xxs", SUPER, 66, gguf_id=16),
    Carrier("iq2_xs", SUPER, 74, gguf_id=17),
    Carrier("iq3_xxs", SUPER, 98, gguf_id=18),
    Carrier("iq1_s", SUPER, 50, gguf_id=19),
    Carrier("iq3_s", SUPER, 110, gguf_id=21),
    Carrier("iq2_s", SUPER, 82, gguf_id=22),
    Carrier("iq1_m", SUPER, 56, gguf_id=29),
    Carrier("tq1_0", SUPER, 54, gguf_id=34),
    Carrier("tq2_0", SUPER, 66, gguf_id=35),
)
