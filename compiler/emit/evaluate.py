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
    Flatten,
    GroupRows,
    HalvesFromPairs,
    Integers,
    Interleave,
    Pack,
    PadColumns,
    PadRows,
    Read,
    Recipe,
    Rows,
    TransposeGroups,
    Unpack,
    Vector,
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
    _held: threading.local = field(default_factory=threading.local, init=False)

    @cached_property
    def unpacker(self) -> Unpacker:
        """What unpacks weights of other tools."""
        return Unpacker(self.checkpoint)

    def rows(  # noqa: C901, PLR0911, PLR0912 - one case a recipe
        self, recipe: Recipe, start: int, stop: int, errors: ErrorSums
    ) -> Bytes:
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
            case Flatten():
                return self.rows(recipe.source, start, stop, errors)
            case HalvesFromPairs() | GroupRows():
                source = _source_rows(recipe, np.arange(start, stop))
                first, last = int(source.min()), int(source.max())
                return self.rows(recipe.source, first, last + 1, errors)[source - first]
            case Interleave():
                return np.concatenate([self.rows(*piece, errors) for piece in _interleaved(recipe, start, stop)])
            case PadRows():
                return self._padded_rows(recipe, start, stop, errors)
            case PadColumns():
                return _padded_columns(recipe, self.rows(recipe.source, start, stop, errors))
            case TransposeGroups():
                return self._transposed(recipe, start, stop, errors)
            case Integers():
                return self._integers(recipe, start, stop)
            case Vector():
                k = recipe.source.shape[1]
                whole = self.rows(recipe.source, start // k, -(-stop // k), errors)
                return whole.reshape(-1, 4)[start % k :][: stop - start]
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

    def _padded_rows(self, recipe: PadRows, start: int, stop: int, errors: ErrorSums) -> Bytes:
        group, i = np.divmod(np.arange(start, stop), recipe.padded)
        held = i < recipe.period
        size = FORMATS[recipe.format].row_bytes(recipe.shape[1] if len(recipe.shape) == 2 else 1)
        out = np.zeros((stop - start, size), np.uint8)
        if held.any():
            source = (group * recipe.period + i)[held]
            first, last = int(source[0]), int(source[-1])
            out[held] = self.rows(recipe.source, first, last + 1, errors)[source - first]
        return out

    def _transposed(self, recipe: TransposeGroups, start: int, stop: int, errors: ErrorSums) -> Bytes:
        n, out = recipe.source.shape[1], list[Bytes]()
        while start < stop:
            group, first = divmod(start, n)
            last = min(n, first + stop - start)
            out.append(np.ascontiguousarray(self._group(recipe, group, errors)[:, first:last].swapaxes(0, 1)))
            start += last - first
        return np.concatenate(out).reshape(sum(len(part) for part in out), -1)

    def _group(self, recipe: TransposeGroups, group: int, errors: ErrorSums) -> Bytes:
        """One group before it is transposed, [K, N, bytes]; kept for the strips of rows that follow on this thread."""
        held: tuple[TransposeGroups, int, Bytes] | None = self._held.__dict__.get("group")
        if held is None or held[:2] != (recipe, group):
            k = recipe.shape[1]
            data = self.rows(recipe.source, group * k, (group + 1) * k, errors)
            held = recipe, group, data.reshape(k, recipe.source.shape[1], -1)
            self._held.__dict__["group"] = held
        return held[2]

    def _integers(self, recipe: Integers, start: int, stop: int) -> Bytes:
        info = self.checkpoint.tensors[recipe.source.tensor]
        values = self.checkpoint.read_rows(info, start, stop).view("<i4" if info.format == "i32" else "<i8")
        bad = (values < 0) | (values >= recipe.limit)
        if bad.any():
            row = int(np.argwhere(bad)[0][0])
            raise TapeoutError(
                f"{info.file}: tensor {info.name!r} holds {values[bad][0]} in row {start + row}; its numbers must lie "
                f"from 0 to {recipe.limit - 1}"
            )
        return values.astype("<f4").view(np.uint8)

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
            if FORMATS[recipe.to].needs_largest:
                rows = self.native.encode_under(recipe.to, values, self._largest(recipe))
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


def _padded_columns(recipe: PadColumns, rows: Bytes) -> Bytes:
    known = FORMATS[recipe.format]
    before, after = known.row_bytes(recipe.period), known.row_bytes(recipe.padded)
    out = np.zeros((len(rows), rows.shape[1] // before, after), np.uint8)
    out[:, :, :before] = rows.reshape(len(rows), -1, before)
    return out.reshape(len(rows), -1)


def _source_rows(recipe: Rows | HalvesFromPairs | GroupRows, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The input rows that become these output rows."""
    if isinstance(recipe, Rows):
        return recipe.start + rows
    if isinstance(recipe, GroupRows):
        group, i = np.divmod(rows, recipe.stop - recipe.start)
        return group * recipe.period + recipe.start + i
    head = recipe.shape[0] // recipe.heads
    half, i = np.divmod(rows % head, head // 2)
    return rows - rows % head + 2 * i + half


def _interleaved(recipe: Interleave, start: int, stop: int) -> Iterator[tuple[Recipe, int, int]]:
    """The runs of rows of the parts that make up rows [start, stop), in order."""
    sizes = [part.shape[0] // recipe.groups for part in recipe.parts]
    for group in range(start // sum(sizes), -(-stop // sum(sizes))):
        at = group * sum(sizes)
        for part, size in zip(recipe.parts, sizes, strict=True):
            first, last = max(start, at), min(stop, at + size)
            if first < last:
                yield part, group * size + first - at, group * size + last - at
            at += size


def _origin(recipe: Recipe, row: int) -> tuple[str, int] | None:
    """The tensor and row that a row of a recipe comes from, or None for a constant."""
    if isinstance(recipe, Read | Unpack):
        return next(recipe.reads()).tensor, row
    source, first = _source_of(recipe, row)
    return _origin(source, first) if source is not None else None


def _source_of(recipe: Recipe, row: int) -> tuple[Recipe | None, int]:
    """The recipe that a row of this one comes from, and the row there."""
    match recipe:
        case Rows() | HalvesFromPairs() | GroupRows():
            return recipe.source, int(_source_rows(recipe, np.array([row]))[0])
        case PadRows():
            group, i = divmod(row, recipe.padded)
            return recipe.source, group * recipe.period + min(i, recipe.period - 1)
        case TransposeGroups():
            return recipe.source, row // recipe.source.shape[1] * recipe.shape[1]
        case Interleave():
            return next(_interleaved(recipe, row, row + 1))[:2]
        case Concat():
            return next(_overlaps(recipe, row, row + 1))[:2]
        case _:
            return (recipe.inputs[0], row) if recipe.inputs else (None, row)


def _overlaps(recipe: Concat, start: int, stop: int) -> Iterator[tuple[Recipe, int, int]]:
    """The parts of a concatenation that hold rows [start, stop), with the range inside each."""
    at = 0
    for part in recipe.parts:
        rows = part.shape[0]
        first, last = max(start, at), min(stop, at + rows)
        if first < last:
            yield part, first - at, last - at
        at += rows
