"""The layouts in numpy, from the parts that a format's ``codes`` gives: the reference that the C packers must equal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.formats.base import Bytes, Codes
from tapeout.compiler.formats.fp4 import e8m0_bytes
from tapeout.compiler.formats.fp8 import to_e4m3
from tapeout.compiler.layouts import CODE_PLANES, TILE_E4M3_K, TILE_ROWS, plane_geometry

STEP = 4
LINE_K = 32


def pack_tile16(format: str, rows: Bytes, k: int) -> Bytes:
    """Rows [N, row_bytes] of ``k`` elements as one array of tile16 bytes; N is filled up to whole tiles with zeros."""
    known = FORMATS[format]
    missing = -rows.shape[0] % TILE_ROWS
    rows = np.concatenate((rows, np.zeros((missing, rows.shape[1]), np.uint8)))
    tiles = rows.shape[0] // TILE_ROWS
    if known.tiles:
        return _e4m3_tiles(rows.reshape(tiles, TILE_ROWS, -1, known.block_bytes), k // known.block)
    if known.codes is None:
        elements = rows.reshape(tiles, TILE_ROWS, k, known.block_bytes)
        return np.ascontiguousarray(elements.transpose(0, 2, 1, 3)).reshape(-1)
    parts = known.codes(rows)
    fields = [*_scales(parts, tiles), *_groups(parts, tiles), _planes(parts, tiles, k)]
    records = np.concatenate(fields, axis=-1).reshape(tiles, -1)
    if known.row_scale:
        heads = np.ascontiguousarray(parts.d[:, 0], "<f4").view(np.uint8).reshape(tiles, -1)
        records = np.concatenate((heads, records), axis=1)
    return np.ascontiguousarray(records).reshape(-1)


def _e4m3_tiles(blocks: Bytes, count: int) -> Bytes:
    """Records of blocks [tiles, 16, count, 4 + 32]: the scales of the first, then the numbers of each."""
    step = TILE_E4M3_K // LINE_K
    pieces: list[Bytes] = []
    for first in range(0, count, step):
        record = blocks[:, :, first : first + step]
        pieces.append(record[:, :, 0, :4].reshape(len(blocks), -1))
        pieces.append(record[..., 4:].reshape(len(blocks), TILE_ROWS, -1).swapaxes(1, 2).reshape(len(blocks), -1))
    return np.concatenate(pieces, axis=1).reshape(-1)


def _scales(parts: Codes, tiles: int) -> list[Bytes]:
    """d, unless it is one a row, and dmin where there is one: [tiles, supers, bytes]."""
    fields = [] if parts.d_type == "f32" else [_scale_bytes(parts)]
    if parts.dmin is not None:
        fields.append(parts.dmin.astype("<f2").view(np.uint8))
    supers = parts.d.shape[1]
    return [_by_tile(each.reshape(len(each), supers, -1), tiles) for each in fields]


def _scale_bytes(parts: Codes) -> Bytes:
    """d as the bytes that the format stores: [N, supers * bytes]."""
    if parts.d_type == "e8m0":
        return e8m0_bytes(parts.d.astype(np.float32))
    if parts.d_type == "bf16":
        return (parts.d.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2").view(np.uint8)
    return parts.d.astype("<f2").view(np.uint8)


def _sub_bytes(sub: npt.NDArray[np.generic], e4m3: bool) -> Bytes:
    """Sub-scales as the byte that the format stores."""
    return to_e4m3(sub.astype(np.float32)) if e4m3 else sub.astype(np.int8).view(np.uint8)


def _groups(parts: Codes, tiles: int) -> list[Bytes]:
    """For each group of a super-block: sub, submin and zero of the 16 rows, those that the format has."""
    fields: list[Bytes] = []
    if parts.sub is not None:
        fields.append(_sub_bytes(parts.sub, parts.sub_type == "e4m3"))
    fields += [each.astype(np.uint8) for each in (parts.submin, parts.zeros) if each is not None]
    if not fields:
        return []
    groups = parts.super // parts.group
    shaped = [each.reshape(tiles, TILE_ROWS, -1, groups).transpose(0, 2, 3, 1) for each in fields]
    together = np.stack(shaped, axis=3)
    return [together.reshape(tiles, together.shape[1], -1)]


def _planes(parts: Codes, tiles: int, k: int) -> Bytes:
    """The code planes: [tiles, supers, bytes]."""
    # [tile, 32 values of k, step, row, value]
    steps = parts.codes.reshape(tiles, TILE_ROWS, k // LINE_K, LINE_K // STEP, STEP).transpose(0, 2, 3, 1, 4)
    planes: list[Bytes] = []
    for width, low in CODE_PLANES[parts.bits]:
        bits = (steps >> np.uint8(low)) & np.uint8((1 << width) - 1)
        lines = np.zeros((*bits.shape[:2], width, TILE_ROWS, STEP), np.uint8)
        for turn in range(8 // width):
            lines |= bits[:, :, turn * width : (turn + 1) * width] << np.uint8(turn * width)
        planes.append(lines.reshape(tiles, k // LINE_K, -1))
    return np.concatenate(planes, axis=-1).reshape(tiles, k // parts.super, -1)


def _by_tile(field: Bytes, tiles: int) -> Bytes:
    """[N, supers, size] as [tiles, supers, 16 * size]."""
    _, supers, size = field.shape
    return field.reshape(tiles, TILE_ROWS, supers, size).transpose(0, 2, 1, 3).reshape(tiles, supers, -1)


def pack_planes(format: str, rows: Bytes, k: int) -> Bytes:
    """Rows [N, row_bytes] of ``k`` elements, a whole quantized matrix, as the bytes of layout ``planes``."""
    known, planes = FORMATS[format], plane_geometry((rows.shape[0], k), format)
    out = np.zeros(planes.nbytes, np.uint8)
    if known.codes is None:
        blocks = rows.reshape(rows.shape[0], -1, known.block_bytes)
        _put(out, planes.codes[0].offset, planes.codes[0].row_bytes, blocks[..., 4:].reshape(rows.shape[0], k))
        scales = blocks[:: planes.scales.tile_rows, :: planes.group // known.block, :4]
        _put(out, planes.scales.offset, planes.scales.row_bytes, scales.reshape(planes.scales.rows, -1))
        return out
    parts = known.codes(rows)
    codes = parts.codes ^ np.uint8(128) if parts.bits == 8 else parts.codes
    # [row, 32 values of k, step, value]
    steps = codes.reshape(rows.shape[0], -1, LINE_K // STEP, STEP)
    for plane in planes.codes:
        bits = (steps >> np.uint8(plane.low)) & np.uint8((1 << plane.bits) - 1)
        words = np.zeros((*bits.shape[:2], plane.bits, STEP), np.uint8)
        for turn in range(8 // plane.bits):
            words |= bits[:, :, turn * plane.bits : (turn + 1) * plane.bits] << np.uint8(turn * plane.bits)
        _put(out, plane.offset, plane.row_bytes, words.reshape(rows.shape[0], -1))
    _put(out, planes.scales.offset, planes.scales.row_bytes, _scale_rows(parts))
    return out


def _scale_rows(parts: Codes) -> Bytes:
    """The fields of a row of scales, one behind the other, for every row."""
    fields = [_scale_bytes(parts)]
    if parts.dmin is not None:
        fields.append(parts.dmin.astype("<f2").view(np.uint8))
    if parts.sub is not None:
        fields.append(_sub_bytes(parts.sub, parts.sub_type == "e4m3"))
    fields += [each.astype(np.uint8) for each in (parts.submin, parts.zeros) if each is not None]
    return np.concatenate(fields, axis=1)


def _put(out: Bytes, offset: int, row_bytes: int, rows: Bytes) -> None:
    """Rows into a plane of ``row_bytes`` a row."""
    count, width = rows.shape
    out[offset : offset + count * row_bytes].reshape(count, row_bytes)[:, :width] = rows
