"""SHA-256 of segments of a file, taken from the pieces as they are written, in any order.

A manifest states one digest for each chunk of fixed size. A job writes a few ranges of a file, whose ``segments`` are
chunks but at their ends; a chunk that several jobs write to has no digest until it is read again from the file.
"""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHUNK_BYTES = 8 << 20
BLOCK_BYTES = 1 << 20  # that are read at once from a file to be hashed

Range = tuple[int, int]


@dataclass
class _Chunk:
    """One chunk: what is hashed so far, and the pieces that wait for an earlier one."""

    size: int
    done: int = 0
    busy: bool = False
    waiting: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    digest: Any = field(default_factory=hashlib.sha256)


def segments_of(ranges: Iterable[Range], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Range]:
    """Ranges of bytes in rising order, joined where they touch and cut where chunks end."""
    start, stop = 0, 0
    for first, last in ranges:
        if first != stop:
            yield from _cut(start, stop, chunk_bytes)
            start = first
        stop = last
    yield from _cut(start, stop, chunk_bytes)


def _cut(start: int, stop: int, chunk_bytes: int) -> Iterator[Range]:
    while start < stop:
        end = min(stop, start - start % chunk_bytes + chunk_bytes)
        yield start, end
        start = end


class SegmentDigests:
    """The digests of some segments of a file, but for those whose place is in ``skipped``.

    Pieces may come from many threads; at most one chunk of pieces waits a thread, so memory stays bounded.
    """

    def __init__(self, segments: Sequence[Range], skipped: Container[int] = ()) -> None:
        self._segments = segments
        self._starts = [start for start, _ in segments]
        self._skipped = skipped
        self._chunks = [_Chunk(stop - start) for start, stop in segments]
        self._lock = threading.Lock()

    def add(self, offset: int, data: memoryview) -> None:
        """Take the bytes at ``offset`` of the file, all in segments; the caller must leave them unchanged."""
        while len(data):
            index = bisect_right(self._starts, offset) - 1
            start, stop = self._segments[index]
            assert start <= offset < stop, (offset, start, stop)
            piece = data[: stop - offset]
            if index not in self._skipped:
                self._add(self._chunks[index], offset - start, piece)
            offset, data = offset + len(piece), data[len(piece) :]

    def hexdigest(self, index: int) -> str:
        """The digest of a segment, of which every byte must have been added."""
        chunk = self._chunks[index]
        assert chunk.done == chunk.size, "the file has holes"
        return chunk.digest.hexdigest()

    def _add(self, chunk: _Chunk, within: int, piece: memoryview) -> None:
        with self._lock:
            chunk.waiting[within] = piece
            if chunk.busy:
                return
            chunk.busy = True
        while True:
            with self._lock:
                ready = chunk.waiting.pop(chunk.done, None)
                if ready is None:
                    chunk.busy = False
                    return
            chunk.digest.update(ready)
            chunk.done += len(ready)


def digest_chunks(data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> tuple[str, ...]:
    """The digest of every chunk of bytes that are in memory."""
    starts = range(0, len(data), chunk_bytes)
    return tuple(hashlib.sha256(data[at : at + chunk_bytes]).hexdigest() for at in starts)


def digest_range(path: Path, start: int, stop: int) -> str:
    """The digest of bytes of a file, fewer if it ends before ``stop``. Raises OSError."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while start < stop:
            data = os.pread(fd, min(stop - start, BLOCK_BYTES), start)
            if not data:
                break
            digest.update(data)
            start += len(data)
    finally:
        os.close(fd)
    return digest.hexdigest()
