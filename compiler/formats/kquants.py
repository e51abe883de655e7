"""Super-blocks of 256 with quantized scales: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

Layouts are those of gguf-py's ``quants.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats.affine import blocks_of, decoder, fields, flat, half, half_bytes
from tapeout.compiler.formats.base import Bytes, Codes, Floats, Format
from tapeout.compiler.formats.ksearch import search_affine, search_symmetric, super_blocks

SUPER = 256
Scales = npt.NDArray[np.int16]


def _codes_q2_k(data: Bytes) -> Codes:
    """scales[16], qs[64], d, dmin; a scale byte holds the scale (low) and the minimum (high) of 16 elements."""
    blocks = blocks_of(data, 84)
    packed = blocks[..., :16]
    sub = flat(packed & np.uint8(15)).astype(np.int16)
    submin = flat(packed >> np.uint8(4)).astype(np.int16)
    codes = flat(_two_bits(blocks[..., 16:80]))
    return Codes(2, 16, SUPER, 0, codes, half(blocks, 80), sub, half(blocks, 82), submin)


def _codes_q3_k(data: Bytes) -> Codes:
    """hmask[32], qs[64], scales[12], d; bit b of hmask[l] is the third bit of element 32 b + l."""
    blocks = blocks_of(data, 110)
    high = fields(blocks[..., :32], tuple(range(8)), 1)
    codes = flat(_two_bits(blocks[..., 32:96])) | flat(high << np.uint8(2))
    packed = blocks[..., 96:108]
    low = flat(fields(packed[..., :8], (0, 4), 15))
    top = flat(fields(packed[..., 8:], (0, 2, 4, 6), 3))
    sub = (low | (top << np.uint8(4))).astype(np.int16) - np.int16(32)
    return Codes(3, 16, SUPER, 4, codes, half(blocks, 108), sub)


def _codes_q4_k(data: Bytes) -> Codes:
    """d, dmin, scales[12], qs[128]; 64 elements share 32 bytes, the first 32 in the low nibbles."""
    blocks = blocks_of(data, 144)
    codes = flat(fields(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32), (0, 4), 15))
    sub, submin = _six_bit_pairs(blocks[..., 4:16])
    return Codes(4, 32, SUPER, 0, codes, half(blocks, 0), sub, half(blocks, 2), submin)


def _codes_q5_k(data: Bytes) -> Codes:
    """As Q4_K, with qh[32] before qs: bit s of qh[l] is the fifth bit of element l of sub-block s."""
    blocks = blocks_of(data, 176)
    low = flat(fields(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32), (0, 4), 15))
    high = flat(fields(blocks[..., 16:48], tuple(range(8)), 1))
    sub, submin = _six_bit_pairs(blocks[..., 4:16])
    return Codes(5, 32, SUPER, 0, low | (high << np.uint8(4)), half(blocks, 0), sub, half(blocks, 2), submin)


def _codes_q6_k(data: Bytes) -> Codes:
    """ql[128], qh[64], int8 scales[16], d; each half of 128 elements uses 64 bytes of ql and 32 of qh."""
    blocks = blocks_of(data, 210)
    low = flat(fields(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64), (0, 4), 15))
    high = flat(_two_bits(blocks[..., 128:192]))
    sub = flat(np.ascontiguousarray(blocks[..., 192:208])).view(np.int8).astype(np.int16)
    return Codes(6, 16, SUPER, 32, low | (high << np.uint8(4)), half(blocks, 208), sub)


def _two_bits(packed: Bytes) -> Bytes:
    """Element 128 n + 32 k + l sits at bits 2 k of byte 32 n + l."""
    return fields(packed.reshape(*packed.shape[:-1], 2, 32), (0, 2, 4, 6), 3)


def _six_bit_pairs(packed: Bytes) -> tuple[Scales, Scales]:
    """Scales and minima [rows, K/32] of 12 bytes a super-block, 6 bits each."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    high = np.uint8(0x30)
    sub = np.concatenate((first & np.uint8(63), (third & np.uint8(15)) | ((first >> np.uint8(2)) & high)), axis=-1)
    submin = np.concatenate((second & np.uint8(63), (third >> np.uint8(4)) | ((second >> np.uint8(2)) & high)), axis=-1)
    return flat(sub).astype(np.int16), flat(submin).astype(np.int16)


def _encode_affine(data: Floats, top: int) -> Bytes:
    """Q4_K (top 15) and Q5_K (top 31)."""
    pieces: list[Bytes] = []
    for blocks in super_blocks(data):
        choice, codes = search_affine(blocks, top)
        by_sub = codes.reshape(-1, 8, 32)
        nibbles = (by_sub[:, 0::2] & np.uint8(15)) | (by_sub[:, 1::2] << np.uint8(4))
        pairs = _pack_pairs(choice.sub.reshape(-1, 8), choice.submin.reshape(-1, 8))
        parts = [half_bytes(choice.d, "a K-quant"), half_bytes(choice.dmin, "a K-quant"), pairs]
        if top == 31:
            parts.append(np.packbits(by_sub >> np.uint8(4), axis=1, bitorder="little")[:, 0])
        pieces.append(np.concatenate([*parts, nibbles.reshape(-1, 128)], axis=1))
    return np.concatenate(pieces).reshape(data.shape[0], -1)


def _encode_q4_k(data: Floats) -> Bytes:
    return _encode_affine(data, 15)


def _encode_q5_k(data: Floats) -> Bytes:
    return _encode_affine(data, 31)


def _encode_q6_k(data: Floats) -> Bytes:
    pieces: list[Bytes] = []
    for blocks in super_blocks(data):
        choice, codes = search_symmetric(blocks)
        halves = codes.reshape(-1, 2, 4, 32)
        low = (halves[:, :, :2] & np.uint8(15)) | (halves[:, :, 2:] << np.uint8(4))
        steps = np.array([0, 2, 4, 6], np.uint8)[:, None]
        high = np.bitwise_or.reduce((halves >> np.uint8(4)) << steps, axis=2)
        sub = choice.sub.reshape(-1, 16).astype(np.int8).view(np.uint8)
        parts = [low.reshape(-1, 128), high.reshape(-1, 64), sub, half_bytes(choice.d, "a K-quant")]
        pieces.append(np.concatenate(parts, axis=1))
    return np.concatenate(pieces).reshape(data.shape[0], -1)


def _pack_pairs(sub: Floats, submin: Floats) -> Bytes:
    """The inverse of ``_six_bit_pairs`` for one super-block a row, [B, 12]."""
    scales, minima = sub.astype(np.uint8), submin.astype(np.uint8)
    first = scales[:, :4] | ((scales[:, 4:] >> np.uint8(4)) << np.uint8(6))
    second = minima[:, :4] | ((minima[:, 4:] >> np.uint8(4)) << np.uint8(6))
    third = (scales[:, 4:] & np.uint8(15)) | (minima[:, 4:] << np.uint8(4))
    return np.concatenate([first, second, third], axis=1)


K_QUANTS: dict[str, Format] = {
    "q2_k": Format("q2_k", SUPER, 84, decoder(_codes_q2_k), None, _codes_q2_k, gguf_id=10),
    "q3_k": Format("q3_k", SUPER, 110, decoder(_codes_q3_k), None, _codes_q3_k, gguf_id=11),
    "q4_k": Format("q4_k", SUPER, 144, decoder(_codes_q4_k), _encode_q4_k, _codes_q4_k, gguf_id=12),
    "q5_k": Format("q5_k", SUPER, 176, decoder(_codes_q5_k), _encode_q5_k, _codes_q5_k, gguf_id=13),
    "q6_k": Format("q6_k", SUPER, 210, decoder(_codes_q6_k), _encode_q6_k, _codes_q6_k, gguf_id=14),
}
