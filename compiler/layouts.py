"""Byte layouts of weights in an artifact: how many bytes each takes, and where each starts in the weights file.

A layout is what a kernel reads. ``raw`` is the format's own bytes, row after row. ``tile16`` cuts a matrix [N, K] in
tiles of 16 rows (N filled up with zero rows) so that one vector register holds one column step of a whole tile.

tile16, float formats: ``[tile][k][16 rows]`` elements.
tile16, quantized formats: for each tile, for each super-block along K, one record of
``d`` f16[16], ``dmin`` f16[16] (formats with a minimum), per group ``sub`` int8[16] and ``submin`` uint8[16] (formats
with sub-scales), then for each 32 values of k the code planes (``CODE_PLANES``). In a plane a step is 4 values of k and
byte ``r * 4 + j`` of a 64-byte line belongs to row r, k = 4 * step + j:
8-bit: line s is step s; 4-bit: line p holds steps p (low) and p + 4 (high); 2-bit: line p holds steps p, p+2, p+4, p+6
from the low bits up; 1-bit: one line, bit s is step s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tapeout.compiler.formats import FORMATS
from tapeout.runtime.errors import TapeoutError

TILE_ROWS = 16
PAGE = 4096
LINE = 64
PAGE_ALIGNED_FROM = 65536

# Width in bits and position of the lowest bit of every plane, in file order, by the significant bits of a code.
CODE_PLANES: dict[int, tuple[tuple[int, int], ...]] = {
    8: ((8, 0),),
    6: ((4, 0), (2, 4)),
    5: ((4, 0), (1, 4)),
    4: ((4, 0),),
    3: ((2, 0), (1, 2)),
    2: ((2, 0),),
}


@dataclass(frozen=True)
class Layout:
    """One byte layout. ``tile_rows`` rows make the smallest piece that can be written on its own."""

    name: str
    tile_rows: int
    tile_bytes: Callable[[int, str], int]

    def packed_bytes(self, shape: tuple[int, ...], format: str) -> int:
        """Exact bytes of a weight of this shape, without alignment padding."""
        rows, k = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
        return -(-rows // self.tile_rows) * self.tile_bytes(k, format)


@dataclass(frozen=True)
class Record:
    """Geometry of one tile16 record (16 rows of one super-block) of a quantized format."""

    bits: int
    group: int
    super: int
    has_min: bool
    has_sub: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        scales = (2 + 2 * self.has_min) * TILE_ROWS
        subs = self.super // self.group * (1 + self.has_min) * TILE_ROWS if self.has_sub else 0
        return scales + subs + TILE_ROWS * self.super * self.bits // 8


def record_of(format: str) -> Record:
    """The tile16 record of a quantized format, read off the parts of one block."""
    known = FORMATS[format]
    if known.codes is None:
        raise TapeoutError(f"{format} has no integer codes, so it has no quantized tile16 record")
    parts = known.codes(np.zeros((1, known.block_bytes), np.uint8))
    return Record(parts.bits, parts.group, parts.super, parts.dmin is not None, parts.sub is not None)


def _tile16_bytes(k: int, format: str) -> int:
    known = FORMATS[format]
    row = known.row_bytes(k)
    if known.is_float:
        return TILE_ROWS * row
    record = record_of(format)
    return k // record.super * record.nbytes


def _raw_bytes(k: int, format: str) -> int:
    return FORMATS[format].row_bytes(k)


LAYOUTS: dict[str, Layout] = {
    "tile16": Layout("tile16", TILE_ROWS, _tile16_bytes),
    "raw": Layout("raw", 1, _raw_bytes),
}


def packed_bytes(shape: tuple[int, ...], format: str, layout: str) -> int:
    """Exact bytes of a weight [N, K] or [K] in a layout, without alignment padding."""
    return LAYOUTS[layout].packed_bytes(shape, format)


def alignment(nbytes: int) -> int:
    """Where a weight of this size may start: on a page if it is large, else on a cache line."""
    return PAGE if nbytes >= PAGE_ALIGNED_FROM else LINE


def plan_offsets(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """``(offset, bytes)`` of weights of these exact sizes, in order, from the start of the data section.

    The bytes of each include its padding up to the start of the next, so the spans leave no holes. Every weight starts
    on its ``alignment`` and the last ends on one.
    """
    spans: list[tuple[int, int]] = []
    offset = 0
    for index, size in enumerate(sizes):
        step = max(alignment(size), alignment(sizes[index + 1]) if index + 1 < len(sizes) else LINE)
        end = -(-(offset + size) // step) * step
        spans.append((offset, end - offset))
        offset = end
    return spans
