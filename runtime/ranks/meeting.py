"""How ranks that another program started find each other: rank 0 hands out the descriptor of the shared memory.

The socket's name lies in Linux's abstract namespace: it is no file, and is gone with the process that holds it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import time

from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.ranks.environment import Place

_RETRY_S = 0.02


def _name(job: str) -> bytes:
    return b"\0tapeout-" + hashlib.sha256(f"{os.getuid()}/{job}".encode()).hexdigest().encode()


def _same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user: any process may take or try an abstract name."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[1] == os.getuid()


class Host:
    """Rank 0's side."""

    def __init__(self, job: str, fd: int) -> None:
        self._fd, self._socket = fd, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_name(job))
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise TapeoutError(
                f"another run of {job} is starting on this machine; give each run a port or a job of its own"
            ) from error
        self._socket.listen(64)
        self._socket.settimeout(_RETRY_S)

    def serve(self) -> None:
        """Hand the descriptor to one rank, or wait a moment for one."""
        with contextlib.suppress(TimeoutError):
            connection, _ = self._socket.accept()
            with connection, contextlib.suppress(OSError):
                if _same_user(connection):
                    socket.send_fds(connection, [b"tapeout"], [self._fd])

    def close(self) -> None:
        """Give the name back."""
        self._socket.close()


def ask_for_segment(place: Place, deadline: float) -> int:
    """The descriptor that rank 0 hands out, waiting for rank 0 until ``deadline``. Raises TapeoutError."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
            connection.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            connection.connect(_name(place.job))
            if _same_user(connection):
                _, found, _, _ = socket.recv_fds(connection, 16, 1)
                if found:
                    return found[0]
        if time.monotonic() > deadline:
            raise TapeoutError(
                f"rank {place.rank} found no rank 0 of {place.job} on this machine; start all ranks together, on one "
                "machine"
            )
        time.sleep(_RETRY_S)
