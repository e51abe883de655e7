"""Evaluates Unpack recipes: what other tools packed becomes rows of a format of ours, codes and scales untouched.

Where codes lie transposed (GPTQ, AWQ), a band of columns is read and kept for the strips of rows that follow.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.formats import FORMATS, row_bytes
from tapeout.compiler.formats.base import Bytes
from tapeout.compiler.formats.fp8 import BLOCK, TILE
from tapeout.compiler.recipes import Read, Unpack
from tapeout.runtime.errors import TapeoutError

Words = npt.NDArray[np.uint32]

LINE = 32  # elements whose nibbles lie in 16 bytes, the first half in the low ones
BAND_BYTES = 4 << 20  # of columns that are read at once
BANDS = 3  # of codes, scales and zero points
SYMMETRIC = 8
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of an AWQ word that holds each of its eight columns."""
_LOW, _HIGH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
_EXPONENT = {"f16": 0x7C00, "bf16": 0x7F80}


@dataclass(frozen=True)
class Unpacker:
    """Rows of unpacked weights. Safe to use from many threads."""

    checkpoint: Checkpoint
    _bands: threading.local = field(default_factory=threading.local, init=False)

    def rows(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """Rows [start, stop) in the recipe's format. Raises TapeoutError for a scale that is not finite."""
        if recipe.packing == "fp8":
            return self._fp8(recipe, start, stop)
        scales, zeros = self._scales(recipe, start, stop), self._zeros(recipe, start, stop)
        known = FORMATS[recipe.to]
        count, k = stop - start, recipe.shape[1]
        blocks = k // known.block
        out = np.empty((count, blocks, known.block_bytes), np.uint8)
        out[..., :2] = _spread(scales, blocks)[..., None].view(np.uint8)
        head = known.block_bytes - known.block // 2
        if head == 3:
            assert zeros is not None, recipe
            out[..., 2] = _spread(zeros, blocks)
        elif zeros is not None and (zeros != SYMMETRIC).any():
            row = start + int(np.argwhere(zeros != SYMMETRIC)[0][0])
            raise TapeoutError(
                f"{self._where(recipe.zeros)} holds a zero point other than 8 for row {row}, but quantization_config "
                "says sym: true, under which every zero point is 8; say sym: false if the file is right"
            )
        out[..., head:] = self._lines(recipe, start, stop).reshape(count, blocks, -1)
        return out.reshape(count, -1)

    def _lines(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """Codes as lines of 16 bytes for each 32 elements: uint8 [rows, K / 32, 16]."""
        info = self._info(recipe.codes)
        if recipe.packing == "pack-quantized":
            return _lines_in_order(self.checkpoint.read_rows(info, start, stop))
        if recipe.packing == "awq":
            codes = _awq_columns(self._words(info, start // 8, -(-stop // 8)))[start % 8 :][: stop - start]
            halves = codes.reshape(len(codes), -1, 2, LINE // 2)
            return halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
        return _lines_in_order(np.ascontiguousarray(self._words(info, start, stop).T).view(np.uint8))

    def _scales(self, recipe: Unpack, start: int, stop: int) -> npt.NDArray[np.uint16]:
        """Bits of the scales, [rows, groups]."""
        info = self._info(recipe.scales)
        if recipe.packing == "pack-quantized":
            scales = self.checkpoint.read_rows(info, start, stop).view("<u2")
        else:
            scales = np.ascontiguousarray(self._columns(info, start, stop).view("<u2").T)
        exponent = np.uint16(_EXPONENT[info.format])
        bad = (scales & exponent) == exponent
        if bad.any():
            row, group = (int(place) for place in np.argwhere(bad)[0])
            self._refuse_scale(recipe.scales, f"row {start + row}, group {group}")
        return scales

    def _zeros(self, recipe: Unpack, start: int, stop: int) -> Bytes | None:
        """Zero points, uint8 [rows, groups], or None."""
        if recipe.zeros is None:
            return None
        info = self._info(recipe.zeros)
        first, last = start // 8, -(-stop // 8)
        if recipe.packing == "pack-quantized":
            words = self.checkpoint.read_rows(info, first, last).view("<u4").T
        else:
            words = self._words(info, first, last)
        # [groups, words] -> [rows, groups]
        zeros = _awq_columns(words) if recipe.packing == "awq" else _columns_in_order(words)
        zeros = zeros[start % 8 :][: stop - start]
        if recipe.packing != "gptq":
            return zeros
        if (zeros == 15).any():
            raise TapeoutError(
                f"{self._where(recipe.zeros)} stores the zero point 15 for row "
                f"{start + int(np.argwhere(zeros == 15)[0][0])}, which files of checkpoint_format gptq write for 0 as "
                "for 16; save the model as gptq_v2, which is unambiguous"
            )
        return zeros + np.uint8(1)

    def _words(self, info: TensorInfo, start: int, stop: int) -> Words:
        return self._columns(info, start, stop).view("<u4")

    def _columns(self, info: TensorInfo, start: int, stop: int) -> Bytes:
        """Columns [start, stop) of a matrix as bytes, from the band of them that this thread read last."""
        held: dict[str, tuple[int, int, Bytes]] = self._bands.__dict__.setdefault("held", {})
        first, last, data = held.get(info.name, (0, 0, None))
        size = row_bytes(info.format, 1)
        if data is None or start < first or stop > last:
            first, last = start, min(max(stop, start + BAND_BYTES // (size * info.rows)), info.shape[1])
            data = self.checkpoint.read_columns(info, first, last)
            while len(held) >= BANDS:
                del held[next(iter(held))]
            held[info.name] = first, last, data
        return data[:, (start - first) * size : (stop - first) * size]

    def _fp8(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        codes = self.checkpoint.read_rows(self._info(recipe.codes), start, stop)
        count, k = codes.shape
        out = np.empty((count, k // BLOCK, 4 + BLOCK), np.uint8)
        out[..., 4:] = codes.reshape(count, -1, BLOCK)
        out[..., :4] = self._fp8_scales(recipe, start, stop, k // BLOCK)[..., None].view(np.uint8)
        return out.reshape(count, -1)

    def _fp8_scales(self, recipe: Unpack, start: int, stop: int, blocks: int) -> npt.NDArray[np.float32]:
        """The float32 scale of each block of 32, [rows, blocks]."""
        info = self._info(recipe.scales)
        tall = len(info.shape) == 2 and recipe.to == "fp8_block128"
        first, last = (start // TILE, -(-stop // TILE)) if tall else (0, info.rows)
        scales = FORMATS[info.format].decode(self.checkpoint.read_rows(info, first, last))
        if not np.isfinite(scales).all():
            row, column = (int(place) for place in np.argwhere(~np.isfinite(scales))[0])
            self._refuse_scale(recipe.scales, f"place {[first + row, column]}")
        if not tall:
            return np.broadcast_to(scales.reshape(1, 1), (stop - start, blocks)).astype(np.float32)
        spread = np.repeat(scales, TILE // BLOCK, axis=1)[:, :blocks]
        return spread[np.arange(start, stop) // TILE - first]

    def _refuse_scale(self, read: Read, place: str) -> None:
        raise TapeoutError(
            f"{self._where(read)} holds NaN/Inf in {place}; every scale must be finite, so the file is damaged or the "
            "model was saved after it diverged"
        )

    def _info(self, read: Read) -> TensorInfo:
        info = self.checkpoint.tensors[read.tensor]
        assert (info.shape, info.format) == (read.shape, read.format), read.tensor
        return info

    def _where(self, read: Read | None) -> str:
        assert read is not None
        return f"{self.checkpoint.tensors[read.tensor].file}: tensor {read.tensor!r}"


def _spread(field: npt.NDArray[Any], blocks: int) -> npt.NDArray[Any]:
    """What stands for each group [rows, groups], for every block [rows, blocks]."""
    return np.repeat(field, blocks // field.shape[1], axis=1)


def _lines_in_order(rows: Bytes) -> Bytes:
    """Rows whose nibbles follow each other, low ones first, as lines: byte i of 16 holds elements i and i + 16."""
    words = rows.view("<u8")
    first, second = words[:, 0::2], words[:, 1::2]
    out = np.empty((*first.shape, 8, 2), np.uint8)
    even = (first & _LOW) | (second & _LOW) << np.uint64(4)
    odd = (first >> np.uint64(4)) & _LOW | (second & _HIGH)
    out[..., 0] = even.view(np.uint8).reshape(*first.shape, 8)
    out[..., 1] = odd.view(np.uint8).reshape(*first.shape, 8)
    return out.reshape(*first.shape, 16)


def _columns_in_order(words: Words, places: tuple[int, ...] = tuple(range(8))) -> Bytes:
    """Words [rows, columns / 8] whose column j lies in nibble ``places[j]``, as codes [columns, rows]."""
    rows, count = words.shape
    pairs = np.ascontiguousarray(words.T).view(np.uint8).reshape(count, rows, 4)
    out = np.empty((count, 8, rows), np.uint8)
    for column, place in enumerate(places):
        pair = pairs[..., place // 2]
        out[:, column] = pair >> np.uint8(4) if place % 2 else pair & np.uint8(15)
    return out.reshape(8 * count, rows)


def _awq_columns(words: Words) -> Bytes:
    return _columns_in_order(words, AWQ_PLACES)
