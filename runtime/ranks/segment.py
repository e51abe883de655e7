"""The memory that the ranks of one machine share: who is there, why the run is over, and buffers for collectives.

It is an anonymous file (memfd): it has no name, and is gone with the last process that holds it, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import errno
import fcntl
import mmap
import os
import sys
from enum import IntEnum

from tapeout.runtime.errors import TapeoutError

MOST_RANKS = 64
TICK = 0.1  # seconds between two looks at the others
SILENCE_TICKS = 25  # without a sign of life, until a rank counts as dead or stopped
ASLEEP_TICKS = 40  # in which no thread of a rank works although others wait for it, until it counts as stuck
PATIENCE_S = 60.0
"""For how long the others may wait in a collective for a rank that works. It must exceed the longest layer: all of
8,192 rows may choose experts of one rank, while the others have nothing to do."""
_MAGIC, _VERSION, _BLOCK = 0x4B4E5254, 2, 1024


class RankError(TapeoutError):
    """The run is over because of one of its ranks; every rank and whoever started them raises it."""


class State(IntEnum):
    """What a rank says of itself; TP_RANK_… of comm.h."""

    ABSENT = 0
    HERE = 1
    IDLE = 2
    """Between two steps, for as long as the user likes: the others may wait without end."""
    LEFT = 3


class Reason(IntEnum):
    """Why the run is over. The kernels know LATE, LEFT and DIFFERS as TP_FAULT_… of comm.h."""

    SILENT = 1
    LATE = 2
    LEFT = 3
    DIFFERS = 4
    FAILED = 5
    ABSENT = 6
    REFUSED = 7
    ASLEEP = 8


class _Rank(C.Structure):
    """tp_rank of comm.h."""

    _fields_ = (
        ("arrived", C.c_uint32),
        ("sleepers", C.c_uint32),
        ("brought", C.c_uint64 * 2),
        ("_pad", C.c_char * 40),
        ("state", C.c_uint32),
        ("beats", C.c_uint32),
        ("ready", C.c_uint32),
        ("pid", C.c_uint32),
        ("born", C.c_uint64),  # in clock ticks: another process may get the number
        ("digest", C.c_uint8 * 32),
        ("message", C.c_uint8 * 512),
        ("_rest", C.c_char * (_BLOCK - 64 - 24 - 32 - 512)),
    )


class _Shared(C.Structure):
    """tp_shared of comm.h."""

    _fields_ = (
        ("magic", C.c_uint32),
        ("version", C.c_uint32),
        ("ranks", C.c_uint32),
        ("fault", C.c_uint32),
        ("buffer_bytes", C.c_uint64),
        ("data", C.c_uint64),
        ("patience", C.c_uint32),  # in ticks
        ("_pad", C.c_char * (_BLOCK - 36)),
        ("rank", _Rank * MOST_RANKS),
    )


assert C.sizeof(_Rank) == _BLOCK and C.sizeof(_Shared) == _BLOCK * (1 + MOST_RANKS)


class Segment:
    """The shared memory, mapped. ``fd`` stands for it in other processes."""

    def __init__(self, fd: int) -> None:
        """Map the segment that another process made. Raises TapeoutError when the descriptor is no segment."""
        self.fd = fd
        try:
            self._memory = mmap.mmap(fd, 0)
            self.shared = _Shared.from_buffer(self._memory)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise TapeoutError(
                    f"there is no room for the ranks' shared memory of {os.fstat(fd).st_size:,} bytes; raise the limit "
                    "of this process's address space (ulimit -v)"
                ) from error
            raise TapeoutError(f"file descriptor {fd} is not the shared memory of ranks ({error})") from error
        if (self.shared.magic, self.shared.version) != (_MAGIC, _VERSION):
            raise TapeoutError(f"file descriptor {fd} is not the shared memory of ranks of this version of Tapeout")
        self.address = C.addressof(self.shared)

    @classmethod
    def create(cls, ranks: int, buffer_bytes: int, patience_s: float = PATIENCE_S) -> Segment:
        """A new segment. ``buffer_bytes`` is the largest operand of a collective that a rank may bring.

        Raises TapeoutError for more ranks than a segment holds and where the system gives no such memory.
        """
        if not 1 <= ranks <= MOST_RANKS:
            raise TapeoutError(f"{ranks} ranks were asked for; one machine runs 1 to {MOST_RANKS}")
        if sys.platform != "linux":
            raise TapeoutError("ranks share memory that only Linux has; run the artifact there, or compile it for one")
        each = -(-buffer_bytes // 4096) * 4096
        head = -(-C.sizeof(_Shared) // 4096) * 4096
        size = head + 2 * ranks * each
        try:
            fd = os.memfd_create("tapeout-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
        except OSError as error:
            raise TapeoutError(
                f"the system gives the ranks no shared memory of {size:,} bytes ({error.strerror}); raise the limits "
                "of this process, or use a machine or container that allows memfd_create"
            ) from error
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with mmap.mmap(fd, head) as memory:
            shared = _Shared.from_buffer(memory)
            shared.version, shared.ranks, shared.buffer_bytes, shared.data = _VERSION, ranks, each, head
            shared.patience = max(1, round(patience_s / TICK))
            shared.magic = _MAGIC
            del shared
        return cls(fd)

    @property
    def ranks(self) -> int:
        """How many ranks it is for."""
        return int(self.shared.ranks)

    def claim(self, rank: int) -> bool:
        """Whether no other process has claimed a rank: a lock of one byte, which ends with its process."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        return True

    def touch(self, rank: int) -> None:
        """Write a rank's buffers once, so that no collective waits for the system to find memory."""
        each, data = int(self.shared.buffer_bytes), self.address + int(self.shared.data)
        for turn in range(2):
            C.memset(data + (turn * self.ranks + rank) * each, 0, each)

    def end(self, reason: Reason, rank: int, message: str = "") -> None:
        """State why the run is over, unless that has been stated. Waiting ranks see it within a tick."""
        if self.fault:
            return
        if message:
            text = message.encode()[:511].decode(errors="ignore").encode()
            C.memmove(self.shared.rank[rank].message, text + b"\0", len(text) + 1)
        self.shared.fault = reason << 16 | rank

    @property
    def fault(self) -> tuple[Reason, int] | None:
        """Why the run is over, and because of which rank."""
        fault = int(self.shared.fault)
        return (Reason(fault >> 16), fault & 0xFFFF) if fault else None

    def error(self) -> RankError:
        """Why the run is over, as an exception that names the rank."""
        assert self.fault
        return RankError(self._sentence(*self.fault))

    def _sentence(self, reason: Reason, rank: int) -> str:
        message = bytes(self.shared.rank[rank].message).partition(b"\0")[0].decode(errors="replace")
        patience = int(self.shared.patience) * TICK
        return {
            Reason.SILENT: f"rank {rank} has given no sign of life for {SILENCE_TICKS * TICK:g} s: it was killed or "
            "stopped, and the other ranks were ended",
            Reason.LATE: f"rank {rank} is stuck: the others have waited {patience:g} s for it in a collective, and "
            "were ended",
            Reason.ASLEEP: f"rank {rank} is stuck: it has done nothing for {ASLEEP_TICKS * TICK:g} s, in which the "
            "others waited for it in a collective, and they were ended",
            Reason.LEFT: f"rank {rank} left while other ranks were still waiting for it, and they were ended",
            Reason.DIFFERS: f"rank {rank} runs another step than the ranks before it; all ranks must be given the same "
            "tokens in the same order",
            Reason.FAILED: f"rank {rank} {message}",
            Reason.ABSENT: f"rank {rank} of {self.ranks} has not come; start all ranks at the same time",
            Reason.REFUSED: message,
        }[reason]

    def close(self) -> None:
        """Unmap and close; the addresses become invalid."""
        if self.fd < 0:
            return
        del self.shared
        with contextlib.suppress(BufferError):  # a traceback holds a view, and the memory goes with it
            self._memory.close()
        os.close(self.fd)
        self.fd = -1


def process_state(pid: int) -> tuple[str, int]:
    """What a process does ("T" if it is stopped; proc_pid_stat(5)), and when it was born; ("", 0) for none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", 0
    return fields[0].decode(), int(fields[19])


def is_working(pid: int) -> bool:
    """Whether a thread of a process runs, waits for a core or for a disk; also where the system does not say."""
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError), open(f"{task.path}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] in (b"R", b"D"):
                    return True
    except OSError:
        return True
    return False


class Watch:
    """Notices ranks that are dead, stopped or stuck. Counts its own looks: a machine that stood still blames nobody."""

    def __init__(self, segment: Segment, own: int | None = None) -> None:
        self._segment = segment
        self._others = [rank for rank in range(segment.ranks) if rank != own]
        self._beats = dict.fromkeys(self._others, 0)
        self._silent = dict.fromkeys(self._others, 0)
        self._arrived = dict.fromkeys(self._others, 0)
        self._asleep = dict.fromkeys(self._others, 0)

    def look(self) -> None:
        """To be called every tick."""
        for rank in self._others:
            self._look_for_beats(rank)
            self._look_for_work(rank)

    def _look_for_beats(self, rank: int) -> None:
        block = self._segment.shared.rank[rank]
        beats = int(block.beats)
        quiet = beats == self._beats[rank] and block.state in (State.HERE, State.IDLE)
        self._beats[rank], self._silent[rank] = beats, self._silent[rank] + 1 if quiet else 0
        if self._silent[rank] < SILENCE_TICKS:
            return
        state, born = process_state(int(block.pid))
        if born != block.born or state in ("", "T", "t", "Z", "X"):
            self._segment.end(Reason.SILENT, rank)
        self._silent[rank] = 0  # its interpreter is busy: a long call keeps the thread that beats from running

    def _look_for_work(self, rank: int) -> None:
        block = self._segment.shared.rank[rank]
        arrived = int(block.arrived)
        awaited = block.state == State.HERE and any(
            0 < (int(other.arrived) - arrived) & 0xFFFFFFFF < 1 << 31
            for other in self._segment.shared.rank[: self._segment.ranks]
        )
        if not awaited or arrived != self._arrived[rank]:
            self._arrived[rank], self._asleep[rank] = arrived, 0
        elif is_working(int(block.pid)):
            self._asleep[rank] = max(0, self._asleep[rank] - 3)  # or it was the thread that beats
        else:
            self._asleep[rank] += 1
            if self._asleep[rank] >= ASLEEP_TICKS:
                self._segment.end(Reason.ASLEEP, rank)
