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
from tapeout.compiler.emit.evaluate import ConversionError, ErrorSums, Evaluator, combine_errors
from tapeout.compiler.emit.native import Native
from tapeout.compiler.emit.workers import default_jobs, run_tasks
from tapeout.compiler.formats.base import Bytes
from tapeout.compiler.layouts import LAYOUTS, PAGE, packed_bytes
from tapeout.compiler.recipes import Pack, Recipe
from tapeout.runtime.errors import TapeoutError

TASK_BYTES = 4 << 20
STRIP_VALUES = 1 << 18

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
class _Piece:
    """Rows of one weight, or bytes of a cached one, and where they go in the file."""

    entry: WeightEntry
    start: int
    stop: int
    offset: int
    nbytes: int
    padding: int
    cached: tuple[int, int] | None = None
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
    shape, layout = entry.recipe.shape, LAYOUTS[entry.layout]
    if cached is not None:
        unit, units, tile_rows = 1, entry.packed_bytes, 1
    elif len(shape) == 1:
        unit, units, tile_rows = entry.packed_bytes, 1, shape[0]
    else:
        unit, tile_rows = layout.tile_bytes(shape[1], entry.recipe.format), layout.tile_rows
        units = entry.packed_bytes // unit
    step = max(1, TASK_BYTES // unit)
    for first in range(0, units, step):
        last = min(first + step, units)
        padding = entry.nbytes - entry.packed_bytes if last == units else 0
        rows = (first * tile_rows, min(last * tile_rows, shape[0]))
        place = None if cached is None else (cached.offset + first, last - first)
        offset = data_start + entry.offset + first * unit
        yield _Piece(entry, *rows, offset, (last - first) * unit, padding, place)


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
        out = self._build(piece) if piece.cached is None else self._copy(piece, *piece.cached)
        out[piece.nbytes :] = 0
        self.write(piece.offset, out.data)

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

    def _build(self, piece: _Piece) -> Bytes:
        out = np.empty(piece.nbytes + piece.padding, np.uint8)
        source, layout = piece.entry.source, piece.entry.layout
        matrix = len(source.shape) == 2
        k = source.shape[1] if matrix else 1
        tile_rows = LAYOUTS[layout].tile_rows
        # Strips keep the float32 values of a conversion inside the second-level cache.
        step = max(1, STRIP_VALUES // (k * tile_rows)) * tile_rows
        at = 0
        for start in range(piece.start, piece.stop, step):
            stop = min(start + step, piece.stop)
            rows = self.evaluator.rows(source, start, stop, piece.errors)
            if layout == "tile16":
                to = out[at : at + packed_bytes((stop - start, k), source.format, layout)]
                self.evaluator.native.pack_tile16(source.format, rows, k, to)
            else:
                to = out[at : at + rows.size]
                to[:] = rows.reshape(-1)
            at += to.size
        assert at == piece.nbytes, piece
        return out

    def _copy(self, piece: _Piece, offset: int, nbytes: int) -> Bytes:
        out = np.empty(nbytes + piece.padding, np.uint8)
        fd = self.sources[self.reused[piece.entry.name].file]
        done = 0
        while done < nbytes:
            got = os.preadv(fd, [out.data[done:nbytes]], offset + done)
            if got == 0:
                file = self.reused[piece.entry.name].file
                raise TapeoutError(f"{file}: was cut while its weights were being copied; compile again")
            done += got
        return out
