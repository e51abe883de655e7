"""Weights of all ranks in pieces: the same rows of every rank at once, so that what they share is read only once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tapeout.compiler.cache import CachedWeight
from tapeout.compiler.checkpoints.base import Checkpoint
from tapeout.compiler.emit.evaluate import STRIP_VALUES, ErrorSums, Evaluator, Sums, shared_digests, under_largest
from tapeout.compiler.emit.native import Native
from tapeout.compiler.emit.outputs import OutputFile, aligned
from tapeout.compiler.emit.unpack import BY_COLUMNS
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.formats.base import Bytes
from tapeout.compiler.layouts import LAYOUTS, PAGE, Part, packed_bytes
from tapeout.compiler.recipes import Convert, HalvesFromPairs, Pack, Recipe, TransposeGroups, Unpack
from tapeout.runtime.errors import TapeoutError

TASK_BYTES = 4 << 20  # of one rank's file

Hashed = Callable[[int, int, memoryview], None]
"""Takes the bytes that a rank's file has from an offset on: (rank, offset, bytes)."""


@dataclass(frozen=True)
class Variant:
    """A recipe and the ranks whose files hold what it gives."""

    recipe: Recipe
    ranks: tuple[int, ...]

    @property
    def source(self) -> Recipe:
        """What is packed."""
        return self.recipe.source if isinstance(self.recipe, Pack) else self.recipe


@dataclass(frozen=True)
class WeightEntry:
    """One weight of the plan: ``offset`` and ``nbytes`` (with padding, see ``plan_offsets``) in the data section.

    ``further`` are the recipes of the ranks after the first, of the same shape, format and layout.
    """

    name: str
    recipe: Recipe
    offset: int
    nbytes: int
    further: tuple[Recipe, ...] = ()

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The different recipes, in the order of their first ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, recipe in enumerate(self.recipes):
            ranks.setdefault(recipe.digest, []).append(rank)
        return tuple(Variant(self.recipes[held[0]], tuple(held)) for held in ranks.values())

    @cached_property
    def shared(self) -> frozenset[str]:
        """Digests of what several variants evaluate."""
        return shared_digests([variant.source for variant in self.variants])

    @cached_property
    def under_largest(self) -> tuple[Convert, ...]:
        """The conversions that need the largest magnitude of what they convert."""
        return tuple(each for variant in self.variants for each in under_largest(variant.source))

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """One a rank."""
        return (self.recipe, *self.further)

    @property
    def layout(self) -> str:
        """The layout of the bytes: that of the last step, or the format's own."""
        return self.recipe.layout if isinstance(self.recipe, Pack) else "raw"

    @property
    def packed_bytes(self) -> int:
        """Bytes without padding."""
        return packed_bytes(self.recipe.shape, self.recipe.format, self.layout)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and their length; a vector is a matrix of one column."""
        shape = self.recipe.shape
        return (shape[0], shape[1]) if len(shape) == 2 else (shape[0], 1)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of its layout."""
        return LAYOUTS[self.layout].parts(*self.matrix, self.recipe.format)

    @cached_property
    def unit(self) -> int:
        """Rows that pieces and strips are multiples of: those packed together, and those read together if few."""
        least = LAYOUTS[self.layout].unit(self.recipe.format)
        wanted = math.lcm(least, *_rows_together(self.recipe))
        row = FORMATS[self.recipe.format].row_bytes(self.matrix[1])
        return wanted if wanted * row <= TASK_BYTES else least

    @cached_property
    def strip(self) -> int:
        """Rows that are evaluated at once, which keeps the float32 values of a conversion in the second-level cache."""
        if any(each.packing in BY_COLUMNS for each in _unpacked(self.recipe)):
            return self.matrix[0]
        return max(1, STRIP_VALUES // (self.matrix[1] * self.unit)) * self.unit


def _rows_together(recipe: Recipe) -> Iterator[int]:
    """Rows of groups that are read as a whole whichever of them is wanted."""
    if isinstance(recipe, HalvesFromPairs):
        yield recipe.shape[0] // recipe.heads
    elif isinstance(recipe, TransposeGroups):
        yield recipe.source.shape[1]
    for each in recipe.inputs:
        yield from _rows_together(each)


def _unpacked(recipe: Recipe) -> Iterator[Unpack]:
    if isinstance(recipe, Unpack):
        yield recipe
    for each in recipe.inputs:
        yield from _unpacked(each)


@dataclass(frozen=True)
class Span:
    """Bytes of a file: what is packed, then zeros."""

    offset: int
    nbytes: int
    padding: int

    @property
    def stop(self) -> int:
        """The end, zeros included."""
        return self.offset + self.nbytes + self.padding


@dataclass(frozen=True)
class Piece:
    """Rows of a weight, by its place among the entries, and where they go in each file: one span a part."""

    entry: int
    start: int
    stop: int
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one rank."""
        return sum(span.nbytes + span.padding for span in self.spans)


def cut_pieces(entries: Sequence[WeightEntry], data_start: int) -> Iterator[Piece]:
    """Every weight in pieces of about TASK_BYTES a rank, in order; the last of each carries the padding."""
    for number, entry in enumerate(entries):
        parts, rows = entry.parts, entry.matrix[0]
        unit = sum(part.nbytes * entry.unit // part.rows for part in parts)
        # pieces of a single part start on pages, if few units make up some
        pages = PAGE // math.gcd(unit, PAGE) if len(parts) == 1 else 1
        step = max(1, TASK_BYTES // unit // pages * pages or TASK_BYTES // unit) * entry.unit
        ends = [*(part.offset for part in parts[1:]), entry.nbytes]
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            spans: list[Span] = []
            for part, end in zip(parts, ends, strict=True):
                offset, nbytes = part.span(start, stop)
                padding = end - offset - nbytes if stop == rows else 0
                spans.append(Span(data_start + entry.offset + offset, nbytes, padding))
            yield Piece(number, start, stop, tuple(spans))


@dataclass(frozen=True)
class Emission:
    """All that the bytes of the weights files follow from; plain values, which may travel to another machine.

    Entries lie from ``data_start`` on in files of ``nbytes`` each. ``keys`` are the cache keys of an entry's variants,
    ``reused`` the weights among them that exist, ``paths`` the files, one a rank, which have their size already.
    """

    entries: tuple[WeightEntry, ...]
    checkpoint: Checkpoint
    data_start: int
    nbytes: int
    keys: tuple[tuple[str, ...], ...]
    paths: tuple[Path, ...] = ()
    reused: Mapping[str, CachedWeight] | None = None

    @property
    def ranks(self) -> int:
        """Ranks, and files."""
        return len(self.entries[0].recipes) if self.entries else 1

    def cached(self, entry: int, variant: int) -> CachedWeight | None:
        """Where the packed bytes of a weight exist already."""
        return (self.reused or {}).get(self.keys[entry][variant])


class PieceWriter:
    """The open files of all ranks, a context manager. ``write`` may be called from many threads."""

    def __init__(self, emission: Emission, native: Native) -> None:
        self.emission = emission
        self.native = native
        self.evaluator = Evaluator(emission.checkpoint, native)
        self._files: list[OutputFile] = []
        self._cached: dict[Path, int] = {}

    def __enter__(self) -> PieceWriter:
        total = self.emission.nbytes * self.emission.ranks
        self._files = [OutputFile(path, total) for path in self.emission.paths]
        for weight in (self.emission.reused or {}).values():
            if weight.file not in self._cached:
                self._cached[weight.file] = os.open(weight.file, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()
        for fd in self._cached.values():
            os.close(fd)

    def write(self, piece: Piece, hashed: Hashed) -> list[Sums | None]:
        """Evaluate or copy the piece, write and hash it. Returns the conversion errors of its variants, None without.

        Raises TapeoutError for weights that are not finite or do not fit their format, and OSError when the disk does.
        """
        entry = self.emission.entries[piece.entry]
        errors = [ErrorSums() for _ in entry.variants]
        # An array a span: one that has to wait for an earlier chunk must not keep the others in memory.
        outs = [[aligned(span.nbytes + span.padding, span.offset) for span in piece.spans] for _ in entry.variants]
        packed = [[out[: span.nbytes] for out, span in zip(each, piece.spans, strict=True)] for each in outs]
        build: list[int] = []
        for number in range(len(entry.variants)):
            cached = self.emission.cached(piece.entry, number)
            if cached is None:
                build.append(number)
            else:
                self._copy(piece, cached, packed[number])
        if build:
            self._build(piece, {number: packed[number] for number in build}, errors)
        for variant, each in zip(entry.variants, outs, strict=True):
            for out, span in zip(each, piece.spans, strict=True):
                out[span.nbytes :] = 0
                for rank in variant.ranks if out.size else ():
                    self._files[rank].write(span.offset, out.data)
                    hashed(rank, span.offset, out.data)
        return [each.sums if each.lossy else None for each in errors]

    def _build(self, piece: Piece, outs: Mapping[int, list[Bytes]], errors: list[ErrorSums]) -> None:
        """Strip by strip, the variants side by side."""
        entry = self.emission.entries[piece.entry]
        k, parts = entry.matrix[1], entry.parts
        sources = {number: entry.variants[number].source for number in outs}
        self.evaluator.find_largest(entry.under_largest)
        at = [0] * len(parts)
        for start in range(piece.start, piece.stop, entry.strip):
            stop = min(start + entry.strip, piece.stop)
            ends = [place + part.span(start, stop)[1] for place, part in zip(at, parts, strict=True)]
            with self.evaluator.sharing(entry.shared):
                for number, source in sources.items():
                    rows = self.evaluator.rows(source, start, stop, errors[number])
                    to = [out[first:last] for out, first, last in zip(outs[number], at, ends, strict=True)]
                    self.native.pack(entry.layout, source.format, rows, k, to)
            at = ends
        assert all(at == [out.size for out in each] for each in outs.values()), piece

    def _copy(self, piece: Piece, cached: CachedWeight, outs: list[Bytes]) -> None:
        start = self.emission.data_start + self.emission.entries[piece.entry].offset
        for out, span in zip(outs, piece.spans, strict=True):
            done = 0
            while done < out.size:
                at = cached.offset + span.offset - start + done
                got = os.preadv(self._cached[cached.file], [out.data[done:]], at)
                if got == 0:
                    raise TapeoutError(f"{cached.file}: was cut while its weights were being copied; compile again")
                done += got
