"""Byte layouts of weights in an artifact: how many bytes each takes, and where each starts in the weights file.

A layout is what a kernel reads. ``raw`` is the format's own bytes, row after row. ``tile16`` cuts a matrix [N, K] in
tiles of 16 rows (N filled up with zero rows) so that one vector register holds one column step of a whole tile.

tile16, float formats: ``[tile][k][16 rows]`` elements.
tile16, e4m3 numbers: for each tile, for each 128 values of k (at the end as many as are left), the float32 scales of
the 16 rows, then ``[k][16 rows]`` numbers.
tile16, codes: for each tile, for each super-block along K, one record of ``d`` f16[16] (or bf16, or the byte of an
e8m0), ``dmin`` f16[16] (formats with a minimum), per group ``sub`` int8[16] (or e4m3) and ``submin`` uint8[16] (formats
with sub-scales), ``zeros`` uint8[16] (formats whose groups have a zero of their own), then for each 32 values of k the
code planes (``CODE_PLANES``). Where a row has one d (``row_scale``), no record has it, and f32[16] stand once before
the records of a tile. In a plane a step is 4 values of k and byte ``r * 4 + j`` of a 64-byte line belongs to row r,
k = 4 * step + j: 8-bit: line s is step s; 4-bit: line p holds steps p (low) and p + 4 (high); 2-bit: line p holds steps
p, p+2, p+4, p+6 from the low bits up; 1-bit: one line, bit s is step s.

planes, what GPU kernels read of a quantized matrix: the code planes one behind the other and one plane of scales, each
``[rows][row_bytes]``, rows a multiple of 16 bytes and planes on multiples of 256 (``plane_geometry``). A row of a code
plane holds, for each 32 values of k, a line of 32, 16, 8 or 4 bytes: the words of tile16 above for one row, so byte j
of a word belongs to k = 4 * step + j. 8-bit codes are signed (the code less 128, so zero is 0), or raw e4m3 bytes. A
row of scales holds d[K/super], dmin[K/super], sub[K/group], submin[K/group], zeros[K/group], those that the format has;
of e4m3 numbers, the float32 scales of a row of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.formats.base import Codes
from tapeout.runtime.errors import TapeoutError

TILE_ROWS = 16
TILE_E4M3_K = 128
TILE_D_BYTES = {"f16": 2, "bf16": 2, "e8m0": 1, "f32": 0}
PAGE = 4096
LINE = 64
PAGE_ALIGNED_FROM = 65536
PLANE_ROW = 16
PLANE = 256

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
class Part:
    """A run of equal pieces in a weight's bytes: every ``rows`` rows of the weight take ``nbytes``, from ``offset``."""

    offset: int
    rows: int
    nbytes: int

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """``(offset, bytes)`` of what rows [start, stop) own: the pieces that begin in them."""
        first, last = -(-start // self.rows), -(-stop // self.rows)
        return self.offset + first * self.nbytes, (last - first) * self.nbytes


@dataclass(frozen=True)
class Layout:
    """One byte layout: the parts, in order, of a matrix [N, K] in a format. Between parts lie zeros.

    ``unit`` gives the rows that have to be packed together: pieces of a weight start on multiples of it.
    """

    name: str
    parts: Callable[[int, int, str], tuple[Part, ...]]
    unit: Callable[[str], int]


@dataclass(frozen=True)
class Record:
    """Geometry of one tile16 record (16 rows of one super-block) of a quantized format."""

    bits: int
    group: int
    super: int
    d_type: Literal["f16", "bf16", "e8m0", "f32"]
    has_min: bool
    has_sub: bool
    has_zeros: bool

    @property
    def head(self) -> int:
        """Bytes before the first record of a tile."""
        return 4 * TILE_ROWS if self.d_type == "f32" else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        scales = (TILE_D_BYTES[self.d_type] + 2 * self.has_min) * TILE_ROWS
        subs = self.super // self.group * (1 + self.has_min) * TILE_ROWS if self.has_sub else 0
        zeros = self.super // self.group * self.has_zeros * TILE_ROWS
        return scales + subs + zeros + TILE_ROWS * self.super * self.bits // 8


def record_of(format: str) -> Record:
    """The tile16 record of a quantized format, read off the parts of one block. Raises TapeoutError without one."""
    if not tile16_holds(format):
        served = ", ".join(name for name in FORMATS if tile16_holds(name))
        raise TapeoutError(f"no CPU kernel serves {format}: layout tile16 cannot hold it; formats it holds: {served}")
    parts = _parts_of(format)
    fields = (parts.dmin, parts.sub, parts.zeros)
    return Record(parts.bits, parts.group, parts.super, parts.d_type, *(field is not None for field in fields))


def tile16_holds(format: str) -> bool:
    """Whether layout ``tile16`` can hold a format: floats, e4m3 numbers, and codes under a short scale or one a row."""
    known = FORMATS[format]
    if known.codes is None:
        return known.is_float or known.tiles is not None
    return _parts_of(format).d_type != "f32" or known.row_scale


def planes_hold(format: str) -> bool:
    """Whether layout ``planes`` can hold a format: e4m3 numbers, and codes that are numbers under 16-bit scales.

    GPU kernels take one e4m3 scale for all rows of a block of threads, so rows with a scale each are not held.
    """
    known = FORMATS[format]
    if known.codes is None:
        return known.tiles is not None and known.tiles[0] != 1
    parts = _parts_of(format)
    return parts.table is None and parts.d_type in ("f16", "bf16")


@lru_cache
def _parts_of(format: str) -> Codes:
    """The parts of one block of zero bytes, which say what the parts of any block are."""
    known = FORMATS[format]
    assert known.codes is not None, f"{format} has no integer codes"
    return known.codes(np.zeros((1, known.block_bytes), np.uint8))


@dataclass(frozen=True)
class CodePlane:
    """One plane of codes, [rows][row_bytes]: the ``bits`` bits of every code from bit ``low`` up."""

    bits: int
    low: int
    offset: int
    row_bytes: int


@dataclass(frozen=True)
class ScalesPlane:
    """The plane of scales, [rows][row_bytes], and where each field starts inside a row (None: not there).

    ``tile_rows`` rows of the weight share a row of scales: 1 for integer codes, all for fp8, 128 for fp8_block128.
    """

    offset: int
    rows: int
    tile_rows: int
    row_bytes: int
    d: int
    dmin: int | None = None
    sub: int | None = None
    submin: int | None = None
    zeros: int | None = None


@dataclass(frozen=True)
class Planes:
    """Where everything of a weight [rows, k] lies in layout ``planes``, in bytes from its start.

    ``value = d * sub * (code - zero) + minimum_sign * dmin * submin``, factors that are not there being 1; ``zero`` is
    for codes as the planes hold them (0 for signed 8-bit ones) and 0 where there is a plane field of zeros. ``element``
    says what a code is: an integer, or an e4m3 number.
    """

    rows: int
    k: int
    bits: int
    group: int
    super: int
    zero: int
    minimum_sign: int
    element: Literal["int", "e4m3"]
    d_type: Literal["f16", "bf16", "f32"]
    codes: tuple[CodePlane, ...]
    scales: ScalesPlane
    nbytes: int

    @property
    def has_min(self) -> bool:
        """Whether a minimum is taken off (or added)."""
        return self.scales.dmin is not None


@lru_cache
def plane_geometry(shape: tuple[int, ...], format: str) -> Planes:
    """The geometry of a quantized matrix [N, K] in layout ``planes``.

    Raises ValueError for a K of no whole blocks, and TapeoutError for a format that the layout cannot hold.
    """
    if not planes_hold(format):
        served = ", ".join(name for name in FORMATS if planes_hold(name))
        raise TapeoutError(f"no GPU kernel serves {format}: layout planes cannot hold it; formats it holds: {served}")
    known, (rows, k) = FORMATS[format], shape
    known.row_bytes(k)
    codes: list[CodePlane] = []
    offset = 0
    for width, low in CODE_PLANES[8 if known.tiles else _parts_of(format).bits]:
        row_bytes = _padded(k * width // 8, PLANE_ROW)
        codes.append(CodePlane(width, low, offset, row_bytes))
        offset = _padded(offset + rows * row_bytes, PLANE)
    if known.tiles:
        tile_rows, tile_k = known.tiles[0] or rows, known.tiles[1] or k
        scales = ScalesPlane(offset, -(-rows // tile_rows), tile_rows, _padded(4 * -(-k // tile_k), PLANE_ROW), 0)
        end = offset + scales.rows * scales.row_bytes
        return Planes(rows, k, 8, tile_k, tile_k, 0, -1, "e4m3", "f32", tuple(codes), scales, end)
    parts = _parts_of(format)
    assert parts.d_type in ("f16", "bf16")
    scales = _integer_scales(parts, rows, k, offset)
    zero = 0 if parts.bits == 8 or parts.zeros is not None else parts.zero
    sign = 1 if parts.negate_min else -1
    end = offset + rows * scales.row_bytes
    return Planes(
        *(rows, k, parts.bits, parts.group, parts.super, zero, sign, "int", parts.d_type, tuple(codes), scales, end)
    )


def _integer_scales(parts: Codes, rows: int, k: int, offset: int) -> ScalesPlane:
    at = 0
    places: dict[str, int] = {}
    supers, groups = k // parts.super, k // parts.group
    for name, size in (("d", 2 * supers), ("dmin", 2 * supers), ("sub", groups), ("submin", groups), ("zeros", groups)):
        if getattr(parts, name) is not None:
            places[name] = at
            at += size
    return ScalesPlane(offset, rows, 1, _padded(at, PLANE_ROW), **places)


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step


def _tile16_parts(rows: int, k: int, format: str) -> tuple[Part, ...]:
    del rows
    known = FORMATS[format]
    row = known.row_bytes(k)
    if known.is_float:
        return (Part(0, TILE_ROWS, TILE_ROWS * row),)
    if known.tiles:
        return (Part(0, TILE_ROWS, TILE_ROWS * (4 * -(-k // TILE_E4M3_K) + k)),)
    record = record_of(format)
    return (Part(0, TILE_ROWS, record.head + k // record.super * record.nbytes),)


def _raw_parts(rows: int, k: int, format: str) -> tuple[Part, ...]:
    del rows
    return (Part(0, 1, FORMATS[format].row_bytes(k)),)


def _plane_parts(rows: int, k: int, format: str) -> tuple[Part, ...]:
    planes = plane_geometry((rows, k), format)
    scales = Part(planes.scales.offset, planes.scales.tile_rows, planes.scales.row_bytes)
    return (*(Part(plane.offset, 1, plane.row_bytes) for plane in planes.codes), scales)


def _tile_unit(format: str) -> int:
    return max(TILE_ROWS, _tensor_unit(format))


def _tensor_unit(format: str) -> int:
    tiles = FORMATS[format].tiles
    return tiles[0] or 1 if tiles else 1


LAYOUTS: dict[str, Layout] = {
    "tile16": Layout("tile16", _tile16_parts, _tile_unit),
    "raw": Layout("raw", _raw_parts, _tensor_unit),
    "planes": Layout("planes", _plane_parts, _tensor_unit),
}


def parts_of(shape: tuple[int, ...], format: str, layout: str) -> tuple[Part, ...]:
    """The parts of a weight [N, K], or of a vector [K], which is one row."""
    rows, k = shape if len(shape) == 2 else (1, shape[0])
    return LAYOUTS[layout].parts(rows, k, format)


def packed_bytes(shape: tuple[int, ...], format: str, layout: str) -> int:
    """Exact bytes of a weight [N, K] or [K] in a layout, without alignment padding."""
    return sum(parts_of(shape, format, layout)[-1].span(0, shape[0] if len(shape) == 2 else 1))


def alignment(nbytes: int, line: int = LINE) -> int:
    """Where a weight of this size may start: on a page if it is large, else on a line."""
    return PAGE if nbytes >= PAGE_ALIGNED_FROM else line


def plan_offsets(sizes: Sequence[int], line: int = LINE) -> list[tuple[int, int]]:
    """``(offset, bytes)`` of weights of these exact sizes, in order, from the start of the data section.

    The bytes of each include its padding up to the start of the next, so the spans leave no holes. Every weight starts
    on its ``alignment`` and the last ends on one. ``line`` is the least of them: GPU artifacts use ``PLANE``.
    """
    spans: list[tuple[int, int]] = []
    offset = 0
    for index, size in enumerate(sizes):
        step = max(alignment(size, line), alignment(sizes[index + 1], line) if index + 1 < len(sizes) else line)
        end = -(-(offset + size) // step) * step
        spans.append((offset, end - offset))
        offset = end
    return spans
