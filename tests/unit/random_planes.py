"""Random weights in the layout ``planes``, packed by the words of its description, with their values in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tapeout.compiler.layouts import Planes, plane_geometry

Array = npt.NDArray[Any]


def random_planes(rows: int, k: int, format: str, rng: np.random.Generator) -> tuple[Array, Array]:
    """(bytes, float64 values [rows, k]) of a random weight whose values are of the size of one."""
    planes = plane_geometry((rows, k), format)
    data = np.full(planes.nbytes, 0xA5, np.uint8)  # what lies between planes and fields must not matter
    if planes.element == "e4m3":
        return data, _e4m3(planes, data, rng)
    codes = rng.integers(0, 1 << planes.bits, (rows, k))
    for plane in planes.codes:
        part = codes >> plane.low & ((1 << plane.bits) - 1)
        _rows(data, plane.offset, rows, plane.row_bytes)[:, : k * plane.bits // 8] = _plane(part, plane.bits)
    signed = codes - 128 if planes.bits == 8 else codes
    if planes.bits == 8:
        _rows(data, 0, rows, planes.codes[0].row_bytes)[:, :k] = signed.astype(np.int8).view(np.uint8)
    return data, _scaled(planes, data, signed.astype(np.float64), rng)


def _scaled(planes: Planes, data: Array, codes: Array, rng: np.random.Generator) -> Array:
    scales, rows = planes.scales, planes.rows
    field = _rows(data, scales.offset, rows, scales.row_bytes)
    supers, groups = planes.k // planes.super, planes.k // planes.group
    size = 1.0 / 2 ** (planes.bits - 1)
    sub = np.ones((rows, groups))
    if scales.sub is not None:
        low = -32 if planes.scales.submin is None else 0
        stored = rng.integers(low, 32, (rows, groups)).astype(np.int8)
        field[:, scales.sub : scales.sub + groups] = stored.view(np.uint8)
        sub, size = stored.astype(np.float64), size / 16
    d = _half(rng.uniform(0.5, 2, (rows, supers)) * size, planes.d_type)
    field[:, scales.d : scales.d + 2 * supers] = d[0].view(np.uint8)
    zero: Array | float = float(planes.zero)
    if scales.zeros is not None:
        zeros = rng.integers(0, 1 << planes.bits, (rows, groups)).astype(np.uint8)
        field[:, scales.zeros : scales.zeros + groups] = zeros
        zero = np.repeat(zeros.astype(np.float64), planes.group, 1)
    values = np.repeat(d[1], planes.super, 1) * np.repeat(sub, planes.group, 1) * (codes - zero)
    if scales.dmin is not None:
        submin = np.ones((rows, groups))
        if scales.submin is not None:
            stored = rng.integers(0, 32, (rows, groups)).astype(np.uint8)
            field[:, scales.submin : scales.submin + groups] = stored
            submin = stored / 1.0
        dmin = _half(rng.uniform(-1, 1, (rows, supers)) / (16 if scales.submin is not None else 1), "f16")
        field[:, scales.dmin : scales.dmin + 2 * supers] = dmin[0].view(np.uint8)
        values += planes.minimum_sign * np.repeat(dmin[1], planes.super, 1) * np.repeat(submin, planes.group, 1)
    return values


def _e4m3(planes: Planes, data: Array, rng: np.random.Generator) -> Array:
    codes = rng.integers(0, 256, (planes.rows, planes.k)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x01  # NaN
    _rows(data, 0, planes.rows, planes.codes[0].row_bytes)[:, : planes.k] = codes
    exponent, mantissa = (codes >> 3 & 15).astype(np.int64), (codes & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values = np.where(codes & 0x80, -size, size) / 64
    tiles = planes.scales.rows, -(-planes.k // planes.group)
    scale = rng.uniform(0.5, 2, tiles).astype(np.float32)
    field = _rows(data, planes.scales.offset, planes.scales.rows, planes.scales.row_bytes)
    field[:, : 4 * tiles[1]] = (scale / np.float32(64)).view(np.uint8)
    high = planes.rows if planes.scales.rows == 1 and planes.group == planes.k else planes.group
    spread = np.repeat(np.repeat(scale.astype(np.float64), high, 0), planes.group, 1)
    return values * spread[: planes.rows, : planes.k]


def _plane(part: Array, bits: int) -> Array:
    """Bytes [rows, k * bits / 8]: word i of a line holds every quad q with q % words == i, from the low bits up."""
    words = bits
    quads = part.reshape(part.shape[0], -1, 8 // words, words, 4).astype(np.uint8)  # [row, line, place, word, j]
    out = np.zeros((*quads.shape[:2], words, 4), np.uint8)
    for place in range(8 // words):
        out |= quads[:, :, place] << np.uint8(place * bits)
    return out.reshape(part.shape[0], -1)


def _rows(data: Array, offset: int, rows: int, row_bytes: int) -> Array:
    """The rows of a plane, as a view; the last may lack its padding."""
    return data[offset : offset + rows * row_bytes].reshape(rows, row_bytes)


def _half(values: Array, kind: str) -> tuple[Array, Array]:
    """(bits, values) in f16 or bf16."""
    if kind == "f16":
        half = values.astype(np.float16)
        return half.view(np.uint16), half.astype(np.float64)
    bits = (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
