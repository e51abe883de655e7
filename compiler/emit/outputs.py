"""The files that emission writes: through the page cache, or past it where there is more than it should hold."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

from tapeout.compiler.formats.base import Bytes
from tapeout.compiler.layouts import PAGE

CACHE_SHARE = 4  # an emission of more than this part of the memory leaves the page cache alone


def aligned(nbytes: int, offset: int) -> Bytes:
    """Uninitialised bytes that lie in their page as ``offset`` does in its page of a file."""
    memory = np.empty(nbytes + PAGE, np.uint8)
    start = (offset - memory.ctypes.data) % PAGE
    return memory[start : start + nbytes]


class OutputFile:
    """An existing file of final size that several writers may have open, each writing other bytes.

    If ``total`` bytes are to be written (to all files) that the page cache should not hold, whole pages go to the disk
    directly (O_DIRECT) where the file system can: no copy, no eviction of what others read, and nothing left to sync.
    Only whole pages that lie in memory as in the file do, see ``aligned``; others take the page cache, and no page is
    written both ways.
    """

    def __init__(self, path: Path, total: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._direct = -1
        if total > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // CACHE_SHARE:
            try:
                self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise

    def close(self) -> None:
        """Close it; nothing is synced."""
        os.close(self._file)
        if self._direct >= 0:
            os.close(self._direct)

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset; may be called from many threads. Raises OSError."""
        first = -offset % PAGE
        last = max(first, len(data) - (offset + len(data)) % PAGE)
        if self._direct < 0 or last - first < PAGE:
            _write(self._file, offset, data, 1)
            return
        _write(self._file, offset, data[:first], 1)
        _write(self._direct, offset + first, data[first:last], PAGE)
        _write(self._file, offset + last, data[last:], 1)


def _write(fd: int, offset: int, data: memoryview, unit: int) -> None:
    """All of ``data``, in as many calls as it takes, each a multiple of ``unit``."""
    done = 0
    while done < len(data):
        written = os.pwrite(fd, data[done:], offset + done)
        done += written - written % unit
