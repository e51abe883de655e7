"""The tile16 layout in numpy, from the parts that a format's ``codes`` gives: the reference that pack.c must equal."""

from __future__ import annotations

import numpy as np

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.formats.base import Bytes, Codes
from tapeout.compiler.layouts import CODE_PLANES, TILE_ROWS

STEP = 4
LINE_K = 32


def pack_tile16(format: str, rows: Bytes, k: int) -> Bytes:
    """Rows [N, row_bytes] of ``k`` elements as one array of tile16 bytes; N is filled up to whole tiles with zeros."""
    known = FORMATS[format]
    missing = -rows.shape[0] % TILE_ROWS
    rows = np.concatenate((rows, np.zeros((missing, rows.shape[1]), np.uint8)))
    tiles = rows.shape[0] // TILE_ROWS
    if known.codes is None:
        elements = rows.reshape(tiles, TILE_ROWS, k, known.block_bytes)
        return np.ascontiguousarray(elements.transpose(0, 2, 1, 3)).reshape(-1)
    parts = known.codes(rows)
    records = np.concatenate([_scales(parts, tiles), *_subs(parts, tiles), _planes(parts, tiles, k)], axis=-1)
    return np.ascontiguousarray(records).reshape(-1)


def _scales(parts: Codes, tiles: int) -> Bytes:
    """d, and dmin where there is one: [tiles, supers, bytes]."""
    fields = [parts.d] if parts.dmin is None else [parts.d, parts.dmin]
    blocks = [_by_tile(each.astype("<f2").view(np.uint8).reshape(*each.shape, 2), tiles) for each in fields]
    return np.concatenate(blocks, axis=-1)


def _subs(parts: Codes, tiles: int) -> list[Bytes]:
    """For each group of a super-block: sub, and submin where there is one, of the 16 rows."""
    if parts.sub is None:
        return []
    fields = [parts.sub.astype(np.int8).view(np.uint8)]
    if parts.submin is not None:
        fields.append(parts.submin.astype(np.uint8))
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
