"""Writes an artifact's weights file: weights evaluated from their recipes in pieces, on all cores, bounded memory."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tapeout.compiler.cache import CachedWeight, WeightCache, weight_key
from tapeout.compiler.checkpoints.base import Checkpoint
from tapeout.compiler.emit.digests import CHUNK_BYTES, ChunkDigests
from tapeout.compiler.emit.evaluate import STRIP_VALUES, ConversionError, ErrorSums, Evaluator, combine_errors
from tapeout.compiler.emit.native import Native
from tapeout.compiler.emit.workers import default_jobs, run_tasks
from tapeout.compiler.formats.base import Bytes
from tapeout.compiler.layouts import LAYOUTS, PAGE, Part, packed_bytes
from tapeout.compiler.recipes import Pack, Recipe
from tapeout.runtime.errors import TapeoutError

TASK_BYTES = 4 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class WeightEntry:
    """One weight of the plan: ``offset`` and ``nbytes`` (with padding, see ``plan_offsets``) in the data section."""

    name: str
    recipe: Recipe
    offset: int
    nbytes: int

    @property
    def layout(self) -> str:
        """The layout of the bytes: that of the last step, or the format's own."""
        return self.recipe.layout if isinstance(self.recipe, Pack) else "raw"

    @property
    def source(self) -> Recipe:
        """What is packed."""
        return self.recipe.source if isinstance(self.recipe, Pack) else self.recipe

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


@dataclass(frozen=True)
class EmissionReport:
    """What emission wrote: the file's size and chunk digests, and per weight its cache key and conversion error."""

    nbytes: int
    data_start: int
    chunk_bytes: int
    sha256: tuple[str, ...]
    errors: Mapping[str, ConversionError]
    spans: Mapping[str, CachedWeight]
    built: int
    reused: int


@dataclass(frozen=True)
class _Span:
    """Bytes of the file: what is packed, then zeros."""

    offset: int
    nbytes: int
    padding: int


@dataclass(frozen=True)
class _Piece:
    """Rows of one weight, or bytes of a cached one from ``cached`` on, and where they go: one span a part."""

    entry: WeightEntry
    start: int
    stop: int
    spans: tuple[_Span, ...]
    cached: int | None = None
    errors: ErrorSums = field(default_factory=ErrorSums)


def weights_header(entries: Sequence[WeightEntry]) -> bytes:
    """The safetensors header: one U8 tensor a weight, filled up with spaces so that the data starts on a page."""
    end = 0
    tensors: dict[str, object] = {}
    for entry in entries:
        assert entry.offset == end and entry.nbytes >= entry.packed_bytes, entry.name
        assert entry.name not in tensors, f"two weights are called {entry.name}"
        end = entry.offset + entry.nbytes
        tensors[entry.name] = {"dtype": "U8", "shape": [entry.nbytes], "data_offsets": [entry.offset, end]}
    text = json.dumps(tensors, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def emit_weights(
    entries: Sequence[WeightEntry],
    checkpoint: Checkpoint,
    path: Path,
    native: Native,
    *,
    jobs: int | None = None,
    cache: WeightCache | None = None,
    progress: Progress | None = None,
) -> EmissionReport:
    """Write all weights to ``path`` and return what was written; the same bytes for any ``jobs`` and cache state.

    ``progress`` is called with (bytes done, bytes in all), never from two threads at once. Raises TapeoutError for
    weights that are not finite or do not fit their format, and OSError when the disk does.
    """
    jobs = jobs or default_jobs()
    header = weights_header(entries)
    nbytes = len(header) + (entries[-1].offset + entries[-1].nbytes if entries else 0)
    keys = {entry.name: weight_key(entry.recipe, checkpoint) for entry in entries}
    found = cache.find(keys.values(), jobs) if cache else {}
    reused = {
        entry.name: found[keys[entry.name]]
        for entry in entries
        if keys[entry.name] in found and found[keys[entry.name]].nbytes == entry.packed_bytes
    }
    pieces = {entry.name: list(_pieces(entry, len(header), reused.get(entry.name))) for entry in entries}
    writer = _Writer(Evaluator(checkpoint, native), path, reused, nbytes, progress)
    with writer:
        writer.write(0, memoryview(header))
        run_tasks((piece for each in pieces.values() for piece in each), writer.piece, jobs)
    errors: dict[str, ConversionError] = {}
    spans: dict[str, CachedWeight] = {}
    for entry in entries:
        cached = reused.get(entry.name)
        error = cached.error if cached else combine_errors([piece.errors for piece in pieces[entry.name]])
        if error is not None:
            errors[entry.name] = error
        spans[keys[entry.name]] = CachedWeight(path, len(header) + entry.offset, entry.packed_bytes, error)
    digests = writer.digests.hexdigests()
    return EmissionReport(
        nbytes, len(header), CHUNK_BYTES, digests, errors, spans, len(entries) - len(reused), len(reused)
    )


def _pieces(entry: WeightEntry, data_start: int, cached: CachedWeight | None) -> Iterator[_Piece]:
    """Cut a weight in pieces of about TASK_BYTES; the last carries the padding."""
    if cached is not None:
        return _byte_pieces(entry, data_start, cached)
    return _row_pieces(entry, data_start)


def _byte_pieces(entry: WeightEntry, data_start: int, cached: CachedWeight) -> Iterator[_Piece]:
    for first in range(0, entry.packed_bytes, TASK_BYTES):
        last = min(first + TASK_BYTES, entry.packed_bytes)
        padding = entry.nbytes - last if last == entry.packed_bytes else 0
        span = _Span(data_start + entry.offset + first, last - first, padding)
        yield _Piece(entry, 0, 0, (span,), cached.offset + first)


def _row_pieces(entry: WeightEntry, data_start: int) -> Iterator[_Piece]:
    parts, rows = entry.parts, entry.matrix[0]
    unit = LAYOUTS[entry.layout].unit(entry.recipe.format)
    step = max(1, TASK_BYTES // sum(part.nbytes * unit // part.rows for part in parts)) * unit
    ends = [*(part.offset for part in parts[1:]), entry.nbytes]
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        spans: list[_Span] = []
        for part, end in zip(parts, ends, strict=True):
            offset, nbytes = part.span(start, stop)
            padding = end - offset - nbytes if stop == rows else 0
            spans.append(_Span(data_start + entry.offset + offset, nbytes, padding))
        yield _Piece(entry, start, stop, tuple(spans))


class _Writer:
    """The open weights file. ``piece`` may be called from many threads."""

    def __init__(
        self,
        evaluator: Evaluator,
        path: Path,
        reused: Mapping[str, CachedWeight],
        nbytes: int,
        progress: Progress | None,
    ) -> None:
        self.evaluator = evaluator
        self.path = path
        self.sources = {weight.file: -1 for weight in reused.values()}
        self.reused = reused
        self.digests = ChunkDigests(nbytes)
        self.nbytes = nbytes
        self.progress = progress
        self.done = 0
        self.lock = threading.Lock()
        self.fd = -1

    def __enter__(self) -> _Writer:
        self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        for source in self.sources:
            self.sources[source] = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self.fd, *self.sources.values()):
            if fd >= 0:
                os.close(fd)

    def piece(self, piece: _Piece) -> None:
        """Evaluate or copy one piece, write it, hash it."""
        # An array a span: one that has to wait for an earlier chunk must not keep the others in memory.
        outs = [np.empty(span.nbytes + span.padding, np.uint8) for span in piece.spans]
        packed = [out[: span.nbytes] for out, span in zip(outs, piece.spans, strict=True)]
        if piece.cached is None:
            self._build(piece, packed)
        else:
            self._copy(piece.entry, packed[0], piece.cached)
        for out, span in zip(outs, piece.spans, strict=True):
            out[span.nbytes :] = 0
            if out.size:
                self.write(span.offset, out.data)

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of the file and take them into the digests."""
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], offset + written)
        self.digests.add(offset, data)
        with self.lock:
            self.done += len(data)
            if self.progress is not None:
                self.progress(self.done, self.nbytes)

    def _build(self, piece: _Piece, outs: list[Bytes]) -> None:
        entry, native = piece.entry, self.evaluator.native
        source, k, parts = entry.source, entry.matrix[1], entry.parts
        unit = LAYOUTS[entry.layout].unit(source.format)
        # Strips keep the float32 values of a conversion inside the second-level cache.
        step = max(1, STRIP_VALUES // (k * unit)) * unit
        at = [0] * len(parts)
        for start in range(piece.start, piece.stop, step):
            stop = min(start + step, piece.stop)
            rows = self.evaluator.rows(source, start, stop, piece.errors)
            to: list[Bytes] = []
            for index, part in enumerate(parts):
                _, nbytes = part.span(start, stop)
                to.append(outs[index][at[index] : at[index] + nbytes])
                at[index] += nbytes
            native.pack(entry.layout, source.format, rows, k, to)
        assert at == [out.size for out in outs], piece

    def _copy(self, entry: WeightEntry, out: Bytes, offset: int) -> None:
        file = self.reused[entry.name].file
        fd, done = self.sources[file], 0
        while done < out.size:
            got = os.preadv(fd, [out.data[done:]], offset + done)
            if got == 0:
                raise TapeoutError(f"{file}: was cut while its weights were being copied; compile again")
            done += got
