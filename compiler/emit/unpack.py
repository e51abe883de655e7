"""Evaluates Unpack recipes: what other tools packed becomes rows of a format of ours, codes and scales untouched.

Where codes lie transposed (``BY_COLUMNS``) rows are columns of the file, and better asked for many at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tapeout.compiler.checkpoints.base import TensorInfo
from tapeout.compiler.emit.unpack_floats import FloatUnpacker, lines_in_order, spread
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.formats.base import Bytes
from tapeout.compiler.formats.fp4 import nibbles
from tapeout.compiler.recipes import Unpack
from tapeout.runtime.errors import TapeoutError

Words = npt.NDArray[np.uint32]

LINE = 32  # elements whose nibbles lie in 16 bytes, the first half in the low ones
BY_COLUMNS = ("gptq", "gptq_v2", "awq")
SYMMETRIC = 8
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of an AWQ word that holds each of its eight columns."""


class Unpacker(FloatUnpacker):
    """Rows of unpacked weights. Safe to use from many threads."""

    def rows(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """Rows [start, stop) in the recipe's format. Raises TapeoutError for a scale that is not finite."""
        unpack = {
            "fp8": self.fp8,
            "int-quantized": self.int8,
            "pack-quantized-8": self.int8,
            "mxfp4": self.mxfp4,
            "mxfp4-blocks": self.mxfp4,
            "nvfp4": self.nvfp4,
            "nvfp4-divided": self.nvfp4,
            "gguf-nvfp4": self.gguf_nvfp4,
            "gguf-floats": self.gguf_floats,
        }
        return unpack.get(recipe.packing, self._int4)(recipe, start, stop)

    def _int4(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        scales, zeros = self._scales(recipe, start, stop), self._zeros(recipe, start, stop)
        if recipe.order is not None:
            return self._ordered(recipe, start, scales, zeros)
        known = FORMATS[recipe.to]
        count, k = stop - start, recipe.shape[1]
        blocks = k // known.block
        out = np.empty((count, blocks, known.block_bytes), np.uint8)
        out[..., :2] = spread(scales, blocks)[..., None].view(np.uint8)
        head = known.block_bytes - known.block // 2
        if head == 3:
            assert zeros is not None, recipe
            out[..., 2] = spread(zeros, blocks)
        elif zeros is not None and (zeros != SYMMETRIC).any():
            row = start + int(np.argwhere(zeros != SYMMETRIC)[0][0])
            raise TapeoutError(
                f"{self.where(recipe.zeros)} holds a zero point other than 8 for row {row}, but quantization_config "
                "says sym: true, under which every zero point is 8; say sym: false if the file is right"
            )
        out[..., head:] = self._lines(recipe, start, stop).reshape(count, blocks, -1)
        return out.reshape(count, -1)

    def _ordered(self, recipe: Unpack, start: int, scales: npt.NDArray[np.uint16], zeros: Bytes | None) -> Bytes:
        """float32 values of rows whose columns lie in groups out of order; products of 11 and 5 bits are exact."""
        assert zeros is not None, recipe
        info = self.info(recipe.order)
        order = self.checkpoint.read_rows(info, 0, info.rows).view("<i8" if info.format == "i64" else "<i4").reshape(-1)
        codes = nibbles(self._lines(recipe, start, start + len(scales))).reshape(len(scales), -1)
        values = FORMATS[self.info(recipe.scales).format].decode(scales.view(np.uint8))
        centred = codes.astype(np.float32) - zeros.astype(np.float32)[:, order]
        return (centred * values[:, order]).view(np.uint8)

    def _lines(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """Codes as lines of 16 bytes for each 32 elements: uint8 [rows, K / 32, 16]."""
        info = self.info(recipe.codes)
        if recipe.packing == "pack-quantized":
            return lines_in_order(self.checkpoint.read_rows(info, start, stop))
        if recipe.packing == "awq":
            codes = _awq_columns(self._words(info, start // 8, -(-stop // 8)))[start % 8 :][: stop - start]
            halves = codes.reshape(len(codes), -1, 2, LINE // 2)
            return halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
        return lines_in_order(np.ascontiguousarray(self._words(info, start, stop).T).view(np.uint8))

    def _scales(self, recipe: Unpack, start: int, stop: int) -> npt.NDArray[np.uint16]:
        """Bits of the scales, [rows, groups]."""
        info = self.info(recipe.scales)
        if recipe.packing == "pack-quantized":
            scales = self.checkpoint.read_rows(info, start, stop).view("<u2")
        else:
            scales = np.ascontiguousarray(self.checkpoint.read_columns(info, start, stop).view("<u2").T)
        return self.half_scales(recipe.scales, scales, start)

    def _zeros(self, recipe: Unpack, start: int, stop: int) -> Bytes | None:
        """Zero points, uint8 [rows, groups], or None."""
        if recipe.zeros is None:
            return None
        info = self.info(recipe.zeros)
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
                f"{self.where(recipe.zeros)} stores the zero point 15 for row "
                f"{start + int(np.argwhere(zeros == 15)[0][0])}, which files of checkpoint_format gptq write for 0 as "
                "for 16; save the model as gptq_v2, which is unambiguous"
            )
        return zeros + np.uint8(1)

    def _words(self, info: TensorInfo, start: int, stop: int) -> Words:
        return self.checkpoint.read_columns(info, start, stop).view("<u4")


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
