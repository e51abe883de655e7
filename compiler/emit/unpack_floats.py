"""Unpack recipes whose codes are floats (e4m3, E2M1) or whole bytes, and what all unpacking shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.formats.base import Bytes, Floats
from tapeout.compiler.formats.fp4 import BLOCK as FP4_BLOCK
from tapeout.compiler.formats.fp4 import GROUP, NVFP4_HEAD, e8m0_halves
from tapeout.compiler.formats.fp8 import BLOCK, TILE
from tapeout.compiler.formats.iq import DECODERS
from tapeout.compiler.recipes import Read, Unpack
from tapeout.runtime.errors import TapeoutError

_LOW, _HIGH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
_EXPONENT = {"f16": 0x7C00, "bf16": 0x7F80}
_NVFP4 = 64  # elements of a block of GGUF's NVFP4: four scales, then four times eight bytes


@dataclass(frozen=True)
class PackedTensors:
    """The tensors that packed weights are read from, and the faults that are found in them."""

    checkpoint: Checkpoint

    def info(self, read: Read | None) -> TensorInfo:
        """The tensor that a recipe reads."""
        assert read is not None
        info = self.checkpoint.tensors[read.tensor]
        assert (info.shape, info.format) == (read.shape, read.format), read.tensor
        return info

    def where(self, read: Read | None) -> str:
        """How a sentence about the tensor begins."""
        assert read is not None
        return f"{self.checkpoint.tensors[read.tensor].file}: tensor {read.tensor!r}"

    def check_scales(self, read: Read | None, bad: npt.NDArray[np.bool_], start: int, what: str) -> None:
        """Refuse NaN and infinity among the scales [rows, groups] from row ``start`` on."""
        if bad.any():
            row, group = (int(place) for place in np.argwhere(bad)[0])
            self.refuse_scale(read, f"row {start + row}, {what} {group}")

    def refuse_scale(self, read: Read | None, place: str) -> NoReturn:
        """A scale that is not finite."""
        raise TapeoutError(
            f"{self.where(read)} holds NaN/Inf in {place}; every scale must be finite, so the file is damaged or the "
            "model was saved after it diverged"
        )

    def half_scales(self, read: Read | None, scales: npt.NDArray[np.uint16], start: int) -> npt.NDArray[np.uint16]:
        """Bits of 16-bit scales [rows, groups], which must be finite."""
        exponent = np.uint16(_EXPONENT[self.info(read).format])
        self.check_scales(read, (scales & exponent) == exponent, start, "group")
        return scales


def spread(field: npt.NDArray[Any], blocks: int) -> npt.NDArray[Any]:
    """What stands for each group [rows, groups], for every block [rows, blocks]."""
    return np.repeat(field, blocks // field.shape[1], axis=1)


def lines_in_order(rows: Bytes) -> Bytes:
    """Rows whose nibbles follow each other, low ones first, as lines: byte i of 16 holds elements i and i + 16."""
    words = np.ascontiguousarray(rows).view("<u8")
    first, second = words[:, 0::2], words[:, 1::2]
    out = np.empty((*first.shape, 8, 2), np.uint8)
    even = (first & _LOW) | (second & _LOW) << np.uint64(4)
    odd = (first >> np.uint64(4)) & _LOW | (second & _HIGH)
    out[..., 0] = even.view(np.uint8).reshape(*first.shape, 8)
    out[..., 1] = odd.view(np.uint8).reshape(*first.shape, 8)
    return out.reshape(*first.shape, 16)


class FloatUnpacker(PackedTensors):
    """Rows of weights whose packing is one of ``packings``: {packing: function of (recipe, start, stop)}."""

    def int8(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """Signed bytes, or bytes with an offset of 128 in words, under 16-bit scales."""
        codes = self.checkpoint.read_rows(self.info(recipe.codes), start, stop)
        if recipe.packing == "pack-quantized-8":
            codes ^= np.uint8(128)
        scales = self.checkpoint.read_rows(self.info(recipe.scales), start, stop).view("<u2")
        known = FORMATS[recipe.to]
        out = np.empty((len(codes), codes.shape[1] // known.block, 2 + known.block), np.uint8)
        scales = spread(self.half_scales(recipe.scales, scales, start), out.shape[1])
        out[..., :2] = scales[..., None].view(np.uint8)
        out[..., 2:] = codes.reshape(*out.shape[:2], known.block)
        return out.reshape(len(codes), -1)

    def fp8(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """e4m3 codes."""
        codes = self.checkpoint.read_rows(self.info(recipe.codes), start, stop)
        count, k = codes.shape
        out = np.empty((count, k // BLOCK, 4 + BLOCK), np.uint8)
        out[..., 4:] = codes.reshape(count, -1, BLOCK)
        out[..., :4] = self._fp8_scales(recipe, start, stop, k // BLOCK)[..., None].view(np.uint8)
        return out.reshape(count, -1)

    def _fp8_scales(self, recipe: Unpack, start: int, stop: int, blocks: int) -> Floats:
        """The float32 scale of each block of 32, [rows, blocks]."""
        info, tiles = self.info(recipe.scales), recipe.to == "fp8_block128"
        height = TILE if tiles else 1 if len(info.shape) == 2 and info.rows == recipe.shape[0] else 0
        first, last = (start // height, -(-stop // height)) if height else (0, info.rows)
        scales = _decoded(info, self.checkpoint.read_rows(info, first, last))
        if not np.isfinite(scales).all():
            row, column = (int(place) for place in np.argwhere(~np.isfinite(scales))[0])
            self.refuse_scale(recipe.scales, f"place {[first + row, column]}")
        if tiles:
            wide = np.repeat(scales, TILE // BLOCK, axis=1)[:, :blocks]
            return wide[np.arange(start, stop) // TILE - first]
        of_rows = scales.reshape(-1)[start:stop] if info.shape == recipe.shape[:1] else scales.reshape(-1)
        return np.broadcast_to(of_rows[:, None], (stop - start, blocks)).copy()

    def mxfp4(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """E2M1 codes under powers of two."""
        exponents = self._matrix_rows(recipe.scales, recipe, start, stop)
        self.check_scales(recipe.scales, exponents == 255, start, "group")
        lines = lines_in_order(self._matrix_rows(recipe.codes, recipe, start, stop))
        return np.concatenate((exponents[..., None], lines), axis=-1).reshape(stop - start, -1)

    def nvfp4(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """E2M1 codes under e4m3 scales and one float32 scale."""
        scales = self._matrix_rows(recipe.scales, recipe, start, stop)
        lines = lines_in_order(self._matrix_rows(recipe.codes, recipe, start, stop))
        return self._nvfp4_blocks(recipe, start, scales, lines)

    def gguf_nvfp4(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """The same from blocks of 64; the sign of a scale says nothing there."""
        data = self.checkpoint.read_rows(self.info(recipe.codes), start, stop)
        blocks = data.reshape(len(data), -1, _NVFP4 // GROUP + _NVFP4 // 2)
        scales = np.ascontiguousarray(blocks[..., : _NVFP4 // GROUP]).reshape(len(data), -1) & np.uint8(0x7F)
        # [rows, blocks of 32, two groups of 16, 8 bytes]: low nibbles are elements 0..7, high ones 8..15
        packed = blocks[..., _NVFP4 // GROUP :].reshape(len(data), -1, 2, 8)
        first, second = packed[:, :, 0], packed[:, :, 1]
        low, high = np.uint8(15), np.uint8(0xF0)
        lines = ((first & low) | (second & low) << np.uint8(4), (first >> np.uint8(4)) | (second & high))
        return self._nvfp4_blocks(recipe, start, scales, np.concatenate(lines, axis=-1))

    def gguf_floats(self, recipe: Unpack, start: int, stop: int) -> Bytes:
        """float32 numbers of a type that no kernel takes apart."""
        data = self.checkpoint.read_rows(self.info(recipe.codes), start, stop)
        return DECODERS[recipe.codes.format](data).view(np.uint8)

    def _nvfp4_blocks(self, recipe: Unpack, start: int, scales: Bytes, lines: Bytes) -> Bytes:
        self.check_scales(recipe.scales or recipe.codes, (scales & 0x7F) == 0x7F, start, "group")
        count, blocks = lines.shape[:2]
        of_rows = self._tensor_scales(recipe)
        of_rows = np.repeat(of_rows, math.prod(recipe.shape[:-1]) // len(of_rows))[start : start + count]
        out = np.empty((count, blocks, NVFP4_HEAD + FP4_BLOCK // 2), np.uint8)
        out[..., :4] = of_rows.astype("<f4")[:, None].view(np.uint8)[:, None]
        out[..., 4:NVFP4_HEAD] = scales.reshape(count, blocks, -1)
        out[..., NVFP4_HEAD:] = lines
        return out.reshape(count, -1)

    def _tensor_scales(self, recipe: Unpack) -> Floats:
        """The scales that multiply all others, one, or one a matrix of a stack."""
        if recipe.tensor_scale is None:
            return np.ones(1, np.float32)
        info = self.info(recipe.tensor_scale)
        scales = _decoded(info, self.checkpoint.read_rows(info, 0, info.rows)).reshape(-1)
        self.check_scales(recipe.tensor_scale, ~np.isfinite(scales)[:, None], 0, "place")
        if recipe.packing != "nvfp4-divided":
            return scales
        if not scales.all():
            raise TapeoutError(f"{self.where(recipe.tensor_scale)} is 0, and weights are divided by it")
        return np.float32(1) / scales

    def _matrix_rows(self, read: Read | None, recipe: Unpack, start: int, stop: int) -> Bytes:
        """Bytes of rows of the weight, of a tensor with one or more rows for each of them."""
        info = self.info(read)
        each = info.rows // recipe.shape[0]
        return self.checkpoint.read_rows(info, start * each, stop * each).reshape(stop - start, -1)


def _decoded(info: TensorInfo, data: Bytes) -> Floats:
    """Scales as float32, of a float format or of bytes of exponents."""
    if info.format in ("e8m0", "u8"):
        return e8m0_halves(data) * np.float32(2)
    return FORMATS[info.format].decode(data)
