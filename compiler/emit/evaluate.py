"""Evaluates recipes a range of rows at a time: where the bytes of a checkpoint become those of a weight.

Ranks hold pieces of the same tensors: what several of them need of a strip of rows is computed once (``sharing``).
"""

from __future__ import annotations

import contextlib
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Sequence
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
HELD_BYTES = 256 << 20  # of groups before they are transposed, a thread
LEAST_RUN = 8  # rows; where fewer of a group are wanted, those between are read too


@dataclass(frozen=True)
class ConversionError:
    """What conversions did to a weight: sqrt(sum (x - x')^2 / sum x^2), and the largest |x - x'|."""

    relative_rms: float
    max_abs: float


Sums = tuple[float, float, float]


@dataclass
class ErrorSums:
    """Sums behind a ``ConversionError``, one entry a conversion of rows: (x - x')^2, x^2, largest |x - x'|."""

    parts: list[Sums] = field(default_factory=list[Sums])

    @property
    def lossy(self) -> bool:
        """Whether anything was converted."""
        return bool(self.parts)

    @property
    def sums(self) -> Sums:
        """All together; exact before one rounding, so that it does not matter which rank they were computed for."""
        error, square, largest = zip(*self.parts, strict=True) if self.parts else ((), (), ())
        return math.fsum(error), math.fsum(square), max(largest, default=0.0)


def combine_errors(parts: Sequence[Sums | None]) -> ConversionError | None:
    """The error of a weight from the sums of its pieces; None when nothing was converted in any."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    error, square, largest = ErrorSums(known).sums
    return ConversionError(math.sqrt(error / square) if square else 0.0, largest)


@dataclass
class _Shared:
    """The recipes that several ranks evaluate, by digest, and what they gave so far, by (digest, start, stop)."""

    digests: frozenset[str]
    found: dict[tuple[str, int, int], tuple[Bytes, ErrorSums]] = field(
        default_factory=dict[tuple[str, int, int], tuple[Bytes, ErrorSums]]
    )


@dataclass
class _Held(threading.local):
    """What a thread keeps between calls: the strip that ranks share, and groups that are transposed."""

    shared: _Shared | None = None
    groups: dict[tuple[str, int], Bytes] = field(default_factory=dict[tuple[str, int], Bytes])


def shared_digests(recipes: Sequence[Recipe]) -> frozenset[str]:
    """Digests of the recipes that occur in more than one of these expressions."""
    seen, twice = set[str](), set[str]()
    for recipe in recipes:
        own = set(_digests(recipe))
        twice |= seen & own
        seen |= own
    return frozenset(twice)


def _digests(recipe: Recipe) -> Iterator[str]:
    yield recipe.digest
    for each in recipe.inputs:
        yield from _digests(each)


@dataclass(frozen=True)
class Evaluator:
    """Computes rows of recipes. Safe to use from many threads; memory is a small multiple of the rows asked for.

    A row of a vector [K] is one element, so that cuts and concatenations of biases are the same as those of matrices.
    """

    checkpoint: Checkpoint
    native: Native
    _largest_of: dict[str, float] = field(default_factory=dict[str, float], init=False)
    _largest_lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _held: _Held = field(default_factory=_Held, init=False)

    @cached_property
    def unpacker(self) -> Unpacker:
        """What unpacks weights of other tools."""
        return Unpacker(self.checkpoint)

    @contextlib.contextmanager
    def sharing(self, digests: frozenset[str]) -> Generator[None]:
        """Until left, this thread computes the same rows of a recipe among ``digests`` once."""
        before, self._held.shared = self._held.shared, _Shared(digests) if digests else None
        try:
            yield
        finally:
            self._held.shared = before

    def rows(self, recipe: Recipe, start: int, stop: int, errors: ErrorSums) -> Bytes:
        """Rows [start, stop) of a recipe as uint8 [stop - start, row_bytes] in its format; not to be written to.

        Adds the error of every lossy conversion on the way to ``errors``. Raises TapeoutError for NaN or infinite
        weights and for values that the target format cannot hold, naming tensor and row.
        """
        shared = self._held.shared
        if shared is None or recipe.digest not in shared.digests:
            return self._rows(recipe, start, stop, errors)
        key = (recipe.digest, start, stop)
        if key not in shared.found:
            own = ErrorSums()
            shared.found[key] = self._rows(recipe, start, stop, own), own
        rows, own = shared.found[key]
        errors.parts += own.parts
        return rows

    def _rows(  # noqa: C901, PLR0911, PLR0912 - one case a recipe
        self, recipe: Recipe, start: int, stop: int, errors: ErrorSums
    ) -> Bytes:
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
            case HalvesFromPairs():
                source = _source_rows(recipe, np.arange(start, stop))
                first, last = int(source.min()), int(source.max())
                return self.rows(recipe.source, first, last + 1, errors)[source - first]
            case GroupRows():
                return self._of_groups(recipe, start, stop, errors)
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
            data = self.checkpoint.read_columns(info, start, stop).reshape(stop - start, -1)
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

    def _of_groups(self, recipe: GroupRows, start: int, stop: int, errors: ErrorSums) -> Bytes:
        source = _source_rows(recipe, np.arange(start, stop))
        if recipe.stop - recipe.start < LEAST_RUN:
            first, last = int(source[0]), int(source[-1])
            return self.rows(recipe.source, first, last + 1, errors)[source - first]
        return self._runs(recipe.source, source, errors)

    def _padded_rows(self, recipe: PadRows, start: int, stop: int, errors: ErrorSums) -> Bytes:
        group, i = np.divmod(np.arange(start, stop), recipe.padded)
        held = i < recipe.period
        size = FORMATS[recipe.format].row_bytes(recipe.shape[1] if len(recipe.shape) == 2 else 1)
        out = np.zeros((stop - start, size), np.uint8)
        if held.any():
            out[held] = self._runs(recipe.source, (group * recipe.period + i)[held], errors)
        return out

    def _runs(self, recipe: Recipe, rows: npt.NDArray[np.int64], errors: ErrorSums) -> Bytes:
        """Rows in rising order, not those between them: other ranks or later pieces may read these."""
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        found = [self.rows(recipe, int(run[0]), int(run[-1]) + 1, errors) for run in np.split(rows, breaks)]
        return found[0] if len(found) == 1 else np.concatenate(found)

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
        held, key = self._held.groups, (recipe.digest, group)
        if key not in held:
            k = recipe.shape[1]
            data = self.rows(recipe.source, group * k, (group + 1) * k, errors)
            while held and sum(each.nbytes for each in held.values()) + data.nbytes > HELD_BYTES:
                del held[next(iter(held))]
            held[key] = data.reshape(k, recipe.source.shape[1], -1)
        return held[key]

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
        sums = np.zeros(3)
        self.native.add_error(recipe.to, values, rows, sums)
        errors.parts.append((float(sums[0]), float(sums[1]), float(sums[2])))
        return rows

    def _values(self, source: Recipe, start: int, stop: int, errors: ErrorSums) -> Floats:
        k = source.shape[1] if len(source.shape) == 2 else 1
        return self.native.decode(source.format, self.rows(source, start, stop, errors), k)

    def find_largest(self, conversions: Sequence[Convert]) -> None:
        """Look for the magnitudes that these conversions need, all in one pass of its own."""
        with self._largest_lock:
            wanted = {each.digest: each for each in conversions if each.digest not in self._largest_of}
            sources = [each.source for each in wanted.values()]
            for rows, k in {each.shape for each in sources}:
                alike = {digest: each.source for digest, each in wanted.items() if each.shape == (rows, k)}
                self._largest_of.update(self._pass(alike, rows, max(1, STRIP_VALUES // k)))

    def _pass(self, sources: dict[str, Recipe], rows: int, step: int) -> dict[str, float]:
        found, shared = dict.fromkeys(sources, 0.0), shared_digests(list(sources.values()))
        for start in range(0, rows, step):
            with self.sharing(shared):
                for digest, source in sources.items():
                    values = self._values(source, start, min(start + step, rows), ErrorSums())
                    found[digest] = max(found[digest], self.native.largest(values))
        return found

    def _largest(self, recipe: Convert) -> float:
        """The largest magnitude of a whole matrix, which a scale a tensor needs."""
        if recipe.digest not in self._largest_of:
            self.find_largest([recipe])
        return self._largest_of[recipe.digest]

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


def under_largest(recipe: Recipe) -> Iterator[Convert]:
    """The conversions in a recipe that need the largest magnitude of what they convert."""
    if isinstance(recipe, Convert) and FORMATS[recipe.to].needs_largest and recipe.source.format != recipe.to:
        yield recipe
    for each in recipe.inputs:
        yield from under_largest(each)


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
    for number in range(bisect_right(recipe.ends, start), bisect_left(recipe.ends, stop) + 1):
        part, end = recipe.parts[number], recipe.ends[number]
        at = end - part.shape[0]
        yield part, max(start, at) - at, min(stop, end) - at
