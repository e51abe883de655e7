"""Collectives between ranks: the interface, and the one for ranks that share memory.

The launch lists of a CPU artifact hold collectives as launches like any other, with ``["comm", 0]`` for the address of
this rank's communicator. The methods here run one at once.
"""

from __future__ import annotations

import ctypes as C
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tapeout.runtime.ranks.member import Member

_FAULTS = 1 << 16  # engine codes from here on are faults of the segment
_SPIN_S, _SPIN_CROWDED_S = 200e-6, 5e-6


class Communicator(Protocol):
    """Collectives over float32 rows; ``x`` and ``y`` are addresses on the rank's device. Every rank calls the same.

    With N ranks, rank r and its operand x_r:

    ============== ========== =========== =============================================
    collective     columns x  columns y   y
    ============== ========== =========== =============================================
    all_reduce     width      width       x_0 + x_1 + … in this order; ``add``: y += that
    all_gather     width      N × width   x_0, x_1, … side by side
    reduce_scatter N × width  width       columns r × width … of the sum
    all_to_all     N × width  N × width   columns s × width …: x_s's r × width …
    ============== ========== =========== =============================================

    Each raises RankError when another rank has ended the run.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def all_reduce(self, x: int, y: int, rows: int, width: int, *, add: bool = False) -> None:
        """The sum, for every rank."""
        ...

    def all_gather(self, x: int, y: int, rows: int, width: int) -> None:
        """Everyone's columns, for every rank."""
        ...

    def reduce_scatter(self, x: int, y: int, rows: int, width: int) -> None:
        """To each rank its columns of the sum."""
        ...

    def all_to_all(self, x: int, y: int, rows: int, width: int) -> None:
        """To each rank its columns of everyone."""
        ...


class _Comm(C.Structure):
    """tp_comm of comm.h."""

    _fields_ = (
        ("shared", C.c_uint64),
        ("rank", C.c_int32),
        ("ranks", C.c_int32),
        ("barriers", C.c_uint32),
        ("turn", C.c_uint32),
        ("phase", C.c_int32),
        ("patience", C.c_int32),
        ("spin", C.c_int64),
    )


Runner = Callable[[str, int, Mapping[str, int]], int]
"""Runs one launch of a kernel, by its name, over so many rows, with arguments by name; returns the engine's code."""


class SharedMemory:
    """A Communicator of CPU ranks. ``address`` is what the argument ``["comm", 0]`` stands for."""

    def __init__(self, member: Member, run: Runner, threads: int = 1) -> None:
        """``threads`` is how many each rank computes with: ranks that outnumber the CPUs wait without spinning."""
        self.rank, self.count = member.rank, member.count
        self._member, self._run = member, run
        crowded = member.count * threads > len(os.sched_getaffinity(0))
        self._comm = _Comm(
            shared=member.segment.address,
            rank=member.rank,
            ranks=member.count,
            patience=member.segment.shared.patience,
            spin=int(1e9 * (_SPIN_CROWDED_S if crowded else _SPIN_S)),
        )
        self.address = C.addressof(self._comm)

    def all_reduce(self, x: int, y: int, rows: int, width: int, *, add: bool = False, two_shot: bool = False) -> None:
        """See Communicator. ``two_shot`` is faster for large operands of several ranks; the result is the same."""
        self._collective("all_reduce", rows, (x, width, y, width, width), {"add": add, "two_shot": two_shot})

    def all_gather(self, x: int, y: int, rows: int, width: int) -> None:
        """See Communicator."""
        self._collective("all_gather", rows, (x, width, y, width * self.count, width), {"columns": 0})

    def reduce_scatter(self, x: int, y: int, rows: int, width: int) -> None:
        """See Communicator."""
        self._collective("reduce_scatter", rows, (x, width * self.count, y, width, width))

    def all_to_all(self, x: int, y: int, rows: int, width: int) -> None:
        """See Communicator."""
        self._collective("all_to_all", rows, (x, width * self.count, y, width * self.count, width))

    def _collective(
        self, kernel: str, rows: int, shape: Sequence[int], options: Mapping[str, int] | None = None
    ) -> None:
        named = dict(zip(("x", "ldx", "y", "ldy", "k"), shape, strict=True))
        self.raise_for(self._run(kernel, rows, {**named, "comm": self.address, **(options or {})}))

    def raise_for(self, code: int) -> None:
        """Raise RankError if an engine's code says that another rank ended the run."""
        if code >= _FAULTS:
            raise self._member.segment.error()
