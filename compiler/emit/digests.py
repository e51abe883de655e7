"""SHA-256 of each fixed-size chunk of a file, taken from the pieces as they are written, in any order."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import Any

CHUNK_BYTES = 8 << 20


@dataclass
class _Chunk:
    """One chunk: what is hashed so far, and the pieces that wait for an earlier one."""

    size: int
    done: int = 0
    busy: bool = False
    waiting: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    digest: Any = field(default_factory=hashlib.sha256)


class ChunkDigests:
    """Pieces may come from many threads; at most one chunk of pieces waits a thread, so memory stays bounded."""

    def __init__(self, nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.nbytes = nbytes
        self.chunk_bytes = chunk_bytes
        self._chunks = [_Chunk(min(chunk_bytes, nbytes - at)) for at in range(0, nbytes, chunk_bytes)]
        self._lock = threading.Lock()

    def add(self, offset: int, data: memoryview) -> None:
        """Take the bytes at ``offset`` of the file; the caller must leave them unchanged."""
        while len(data):
            index, within = divmod(offset, self.chunk_bytes)
            piece = data[: self.chunk_bytes - within]
            self._add(self._chunks[index], within, piece)
            offset, data = offset + len(piece), data[len(piece) :]

    def hexdigests(self) -> tuple[str, ...]:
        """The digest of every chunk, in order. Every byte must have been added."""
        assert all(chunk.done == chunk.size for chunk in self._chunks), "the file has holes"
        return tuple(chunk.digest.hexdigest() for chunk in self._chunks)

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
