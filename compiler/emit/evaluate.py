"""Evaluates recipes a range of rows at a time: where the bytes of a checkpoint become those of a weight."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tapeout.compiler.checkpoints.base import Checkpoint
from tapeout.compiler.emit.native import Native
from tapeout.compiler.emit.unpack import Unpacker
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.formats.base import Bytes, Floats
from tapeout.compiler.recipes import (
    AddOne,
    Columns,
    Concat,
    Constant,
    Convert,
    Divide,
    HalvesFromPairs,
    Pack,
    Read,
    Recipe,
    Rows,
    Unpack,
)
from tapeout.runtime.errors import TapeoutError

STRIP_VALUES = 1 << 18


@dataclass(frozen=True)
class ConversionError:
    """What conversions did to a weight: sqrt(sum (x - x')^2 / sum x^2), and the largest |x - x'|."""

    relative_rms: float
    max_abs: float


@dataclass
class ErrorSums:
    """Sums behind a ``ConversionError``: (x - x')^2, x^2, largest |x - x'|; and whether anything was converted."""

    sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    lossy: bool = False


def combine_errors(parts: list[ErrorSums]) -> ConversionError | None:
    """The error of a weight from those of its pieces, added in the order given; None when nothing was converted."""
    if not any(part.lossy for part in parts):
        return None
    error, square, largest = 0.0, 0.0, 0.0
    for part in parts:
        error, square = error + float(part.sums[0]), square + float(part.sums[1])
        largest = max(largest, float(part.sums[2]))
    return ConversionError(math.sqrt(error / square) if square else 0.0, largest)


@dataclass(frozen=True)
class Evaluator:
    """Computes rows of recipes. Safe to use from many threads; memory is a small multiple of the rows asked for.

    A row of a vector [K] is one element, so that cuts and concatenations of biases are the same as those of matrices.
    """

    checkpoint: Checkpoint
    native: Native
    _largest_of: dict[Recipe, float] = field(default_factory=dict[Recipe, float], init=False)
    _largest_lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @cached_property
    def unpacker(self) -> Unpacker:
        """What unpacks weights of other tools."""
        return Unpacker(self.checkpoint)

    def rows(self, recipe: Recipe, start: int, stop: int, errors: ErrorSums) -> Bytes:  # noqa: PLR0911 - one a recipe
        """Rows [start, stop) of a recipe as uint8 [stop - start, row_bytes] in its format.

        Adds the error of every lossy conversion on the way to ``errors``. Raises TapeoutError for NaN or infinite
        weights and for values that the target format cannot hold, naming tensor and row.
        """
        match recipe:
            case Read() | Unpack():
                return self._read(recipe, start, stop)
            case Rows():
                return self.rows(recipe.source, recipe.start + start, recipe.start + stop, errors)
            case Columns():
                return self._columns(recipe, start, stop, errors)
            case Concat():
                found = [self.rows(part, first, last, errors) for part, first, last in _overlaps(recipe, start, stop)]
                return found[0] if len(found) == 1 else np.concatenate(found)
            case HalvesFromPairs():
                return self._halves_from_pairs(recipe, start, stop, errors)
            case Convert():
                return self._convert(recipe, start, stop, errors)
            case AddOne():
                return (self.rows(recipe.source, start, stop, errors).view("<f4") + np.float32(1)).view(np.uint8)
            case Divide():
                return self._divide(recipe, start, stop, errors)
            case Constant():
                return np.array(recipe.values[start:stop], "<f4").view(np.uint8).reshape(-1, 4)
            case Pack() | _:
                raise AssertionError(f"{type(recipe).__name__} has no rows")

    def _read(self, recipe: Read | Unpack, start: int, stop: int) -> Bytes:
        """Rows as the checkpoint has them, which must be finite."""
        info = self.checkpoint.tensors[next(recipe.reads()).tensor]
        if isinstance(recipe, Unpack):
            data = self.unpacker.rows(recipe, start, stop)
        elif len(recipe.shape) == 1:
            size = FORMATS[info.format].row_bytes(1)
            data = np.ascontiguousarray(self.checkpoint.read_rows(info, 0, 1).reshape(-1, size)[start:stop])
        else:
            assert (info.shape, info.format) == (recipe.shape, recipe.format), recipe.tensor
            data = self.checkpoint.read_rows(info, start, stop)
        bad = self.native.first_not_finite(recipe.format, data)
        if bad is not None:
            raise TapeoutError(
                f"{info.file}: tensor {info.name!r} has NaN/Inf weights in row {start + bad}; "
                f"every weight must be finite, so the file is damaged or the model was saved after it diverged"
            )
        return data

    def _columns(self, recipe: Columns, start: int, stop: int, errors: ErrorSums) -> Bytes:
        known = FORMATS[recipe.format]
        rows = self.rows(recipe.source, start, stop, errors)
        return np.ascontiguousarray(rows[:, known.row_bytes(recipe.start) : known.row_bytes(recipe.stop)])

    def _halves_from_pairs(self, recipe: HalvesFromPairs, start: int, stop: int, errors: ErrorSums) -> Bytes:
        head = recipe.shape[0] // recipe.heads
        out = np.arange(start, stop)
        half, i = np.divmod(out % head, head // 2)
        source = out - out % head + 2 * i + half
        first, last = int(source.min()), int(source.max())
        return self.rows(recipe.source, first, last + 1, errors)[source - first]

    def _divide(self, recipe: Divide, start: int, stop: int, errors: ErrorSums) -> Bytes:
        over, under = (self.rows(part, start, stop, errors).view("<f4") for part in recipe.inputs)
        if not under.all():
            read = next(recipe.denominator.reads())
            file = self.checkpoint.tensors[read.tensor].file
            raise TapeoutError(f"{file}: tensor {read.tensor!r} holds a zero, and rotary frequencies are divided by it")
        return (over / under).view(np.uint8)

    def _convert(self, recipe: Convert, start: int, stop: int, errors: ErrorSums) -> Bytes:
        source, tiles = recipe.source, FORMATS[recipe.to].tiles
        if source.format == recipe.to:
            return self.rows(source, start, stop, errors)
        if tiles and tiles[0]:
            first, last = start - start % tiles[0], min(stop + -stop % tiles[0], recipe.shape[0])
            if (first, last) != (start, stop):
                return self._convert(recipe, first, last, errors)[start - first : stop - first]
        values = self._values(source, start, stop, errors)
        if recipe.to == "f32":
            return values.view(np.uint8)
        try:
            if tiles and not tiles[0]:
                rows = self.native.encode_fp8(values, self._largest(recipe))
            else:
                rows = self.native.encode(recipe.to, values)
        except ValueError as problem:
            raise TapeoutError(self._cannot_convert(recipe, start, values, str(problem))) from problem
        errors.lossy = True
        self.native.add_error(recipe.to, values, rows, errors.sums)
        return rows

    def _values(self, source: Recipe, start: int, stop: int, errors: ErrorSums) -> Floats:
        k = source.shape[1] if len(source.shape) == 2 else 1
        return self.native.decode(source.format, self.rows(source, start, stop, errors), k)

    def _largest(self, recipe: Convert) -> float:
        """The largest magnitude of a whole matrix, which a scale a tensor needs: found once, by a pass of its own."""
        with self._largest_lock:
            found = self._largest_of.get(recipe)
            if found is None:
                found = 0.0
                rows, k = recipe.shape
                step = max(1, STRIP_VALUES // k)
                for start in range(0, rows, step):
                    values = self._values(recipe.source, start, min(start + step, rows), ErrorSums())
                    found = max(found, self.native.largest(values))
                self._largest_of[recipe] = found
        return found

    def _cannot_convert(self, recipe: Convert, start: int, values: Floats, reason: str) -> str:
        """The sentence for values that do not fit, with the first row that does not."""
        for row in range(len(values)):
            try:
                self.native.encode(recipe.to, values[row : row + 1])
            except ValueError:
                origin = _origin(recipe, start + row)
                if origin is None:
                    return f"a constant cannot be stored as {recipe.to}: {reason}"
                info = self.checkpoint.tensors[origin[0]]
                where = f"{info.file}: row {origin[1]} of tensor {info.name!r}"
                return f"{where} cannot be stored as {recipe.to}: {reason}; f32 would hold it"
        raise AssertionError(reason)


def _pair_of(recipe: HalvesFromPairs, row: int) -> int:
    """The input row that becomes output row ``row``."""
    head = recipe.shape[0] // recipe.heads
    half, i = divmod(row % head, head // 2)
    return row - row % head + 2 * i + half


def _origin(recipe: Recipe, row: int) -> tuple[str, int] | None:
    """The tensor and row that a row of a recipe comes from, or None for a constant."""
    match recipe:
        case Read():
            return recipe.tensor, row
        case Unpack():
            return recipe.codes.tensor, row
        case Rows():
            return _origin(recipe.source, recipe.start + row)
        case HalvesFromPairs():
            return _origin(recipe.source, _pair_of(recipe, row))
        case Concat():
            part, first, _ = next(_overlaps(recipe, row, row + 1))
            return _origin(part, first)
        case _:
            return _origin(recipe.inputs[0], row) if recipe.inputs else None


def _overlaps(recipe: Concat, start: int, stop: int) -> Iterator[tuple[Recipe, int, int]]:
    """The parts of a concatenation that hold rows [start, stop), with the range inside each."""
    at = 0
    for part in recipe.parts:
        rows = part.shape[0]
        first, last = max(start, at), min(stop, at + rows)
        if first < last:
            yield part, first - at, last - at
        at += rows
