"""Weights on their way to the GPU: threads read chunks into pinned memory, check their digests and copy them over."""

from __future__ import annotations

import ctypes as C
import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tapeout.runtime.cuda.driver import Driver
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.manifest import READ_BYTES, ArtifactFile, damage

PIECE = 2 << 20  # bytes a copy
MAX_THREADS = 16
BAR = 30  # characters
PATIENCE = 1.0  # seconds before a bar appears


class Upload:
    """A file on its way to device memory, from byte ``skip`` on; each byte is read once.

    ``finish`` raises TapeoutError naming the first damaged chunk. ``stop`` ends the threads at their next chunk.
    """

    def __init__(self, driver: Driver, folder: Path, file: ArtifactFile, skip: int, address: int, threads: int) -> None:
        self._driver, self._folder, self._file, self._skip, self.address = driver, folder, file, skip, address
        self._chunks = iter(range(len(file.sha256)))
        self._lock = threading.Lock()
        self._failed: list[tuple[int, BaseException]] = []
        self._stopped = False
        self.done = 0
        self.seconds = 0.0
        self._started = time.perf_counter()
        count = max(1, min(threads, MAX_THREADS, len(file.sha256)))
        self._pinned = driver.host_alloc(count * 2 * PIECE)
        self._threads = [
            threading.Thread(target=self._run, args=(self._pinned + 2 * PIECE * index,), daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until everything is on the device; draws a bar on a terminal when that takes long."""
        bar = _Bar(self._file.bytes) if sys.stderr.isatty() else None
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.1)
                if bar and time.perf_counter() - self._started > PATIENCE:
                    bar.draw(self.done)
        if bar:
            bar.erase()
        self.stop()
        if self._failed:
            raise min(self._failed, key=lambda found: found[0])[1]

    def stop(self) -> None:
        """End the threads and give the pinned memory back."""
        self._stopped = True
        for thread in self._threads:
            thread.join()
        if self._threads:
            self._driver.host_free(self._pinned)
            self._threads = []

    def _run(self, pinned: int) -> None:
        number = -1
        try:
            self._driver.activate()
            lane = _Lane(self._driver, pinned)
            try:
                with open(self._folder / self._file.path, "rb", buffering=0) as file:
                    while (number := self._next()) >= 0:
                        self._chunk(file.fileno(), number, lane)
            finally:
                lane.close()
        except (TapeoutError, OSError) as error:
            with self._lock:
                self._failed.append((number, error))
        with self._lock:
            self.seconds = time.perf_counter() - self._started

    def _next(self) -> int:
        with self._lock:
            return -1 if self._failed or self._stopped else next(self._chunks, -1)

    def _chunk(self, fd: int, number: int, lane: _Lane) -> None:
        """Read, hash and copy one chunk, piece by piece."""
        file, digest = self._file, hashlib.sha256()
        start = number * file.chunk_bytes
        stop = min(start + file.chunk_bytes, file.bytes)
        for at in range(start, stop, PIECE):
            size = min(PIECE, stop - at)
            view, address = lane.take()
            for offset in range(0, size, READ_BYTES):  # hashed while it is in the cache
                part = view[offset : min(offset + READ_BYTES, size)]
                if not _fill(fd, part, at + offset):
                    raise damage(self._folder, file, number)
                digest.update(part)
            head = min(max(self._skip - at, 0), size)
            lane.copy(self.address + at + head - self._skip, address + head, size - head)
        if digest.hexdigest() != file.sha256[number]:
            raise damage(self._folder, file, number)
        with self._lock:
            self.done += stop - start


def _fill(fd: int, part: memoryview, at: int) -> bool:
    """Read until a buffer is full; whether the file had that much."""
    while len(part):
        got = os.preadv(fd, [part], at)
        if not got:
            return False
        part, at = part[got:], at + got
    return True


class _Lane:
    """What one thread copies with: two pinned pieces in turn, so that reading and copying overlap."""

    def __init__(self, driver: Driver, pinned: int) -> None:
        self._driver = driver
        self._stream = driver.stream()
        self._pieces: list[tuple[memoryview, int, Any]] = []
        for address in (pinned, pinned + PIECE):
            view = memoryview((C.c_char * PIECE).from_address(address)).cast("B")
            self._pieces.append((view, address, driver.event()))
        self._turn = 0

    def take(self) -> tuple[memoryview, int]:
        """A piece whose last copy is done."""
        self._turn ^= 1
        view, address, event = self._pieces[self._turn]
        self._driver.wait(event)
        return view, address

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the piece taken last."""
        if nbytes:
            self._driver.upload(target, source, nbytes, self._stream)
            self._driver.record(self._pieces[self._turn][2], self._stream)

    def close(self) -> None:
        """Wait for the copies."""
        self._driver.synchronize(self._stream)
        for _, _, event in self._pieces:
            self._driver.event_free(event)
        self._driver.stream_free(self._stream)


class _Bar:
    def __init__(self, total: int) -> None:
        self._total, self._drawn = max(total, 1), False

    def draw(self, done: int) -> None:
        share = done / self._total
        bar = "#" * int(BAR * share)
        sys.stderr.write(f"\rloading weights [{bar:<{BAR}}] {done / 1e9:.1f} of {self._total / 1e9:.1f} GB")
        sys.stderr.flush()
        self._drawn = True

    def erase(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
