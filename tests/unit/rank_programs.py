"""Programs that ranks run in tests: ``python rank_programs.py PROGRAM LIBRARY [ARGUMENT …]``, once for each rank."""

from __future__ import annotations

import ctypes as C
import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from native_engine import Native, build, rows_step

from tapeout.compiler.kernels import collective
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.ranks import Member, RankError, SharedMemory, join, read_place

TARGET = "x86_64_v3"
KERNELS = (collective.ALL_REDUCE, collective.ALL_GATHER, collective.REDUCE_SCATTER, collective.ALL_TO_ALL)
BUFFER_BYTES = 1 << 20
PATIENCE_S = 1.0


def build_library(folder: Path) -> Path:
    """A library of the collectives alone."""
    build(folder, [TARGET], KERNELS)
    return folder / f"cpu-{TARGET}.so"


class Rank:
    """A member with an engine and a communicator."""

    def __init__(self, library: Path, member: Member, threads: int = 1) -> None:
        self.native, self.member, self.rank, self.count = Native(library, threads), member, member.rank, member.count
        self.comm = SharedMemory(member, self.run, threads)

    def run(self, kernel: str, rows: int, arguments: Mapping[str, int]) -> int:
        """See ``Runner``."""
        params = next(entry.params for entry in KERNELS if entry.name == kernel)
        launch = self.native.launch(kernel, *(arguments[name] for name in params))
        return self.native.library.tp_run_one(self.native.engine, C.byref(launch), C.byref(rows_step(rows).native))


def step(rank: Rank, turn: int, k: int = 3001) -> bytes:
    """One all_reduce whose result every rank can check."""
    xs = np.random.default_rng(turn).standard_normal((rank.count, 1, k), np.float32)
    y = np.full((1, k), np.nan, np.float32)
    rank.member.busy()
    rank.comm.all_reduce(xs[rank.rank].ctypes.data, y.ctypes.data, 1, k, two_shot=turn % 2 == 1)
    rank.member.idle()
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    assert total.tobytes() == y.tobytes(), f"wrong sum in turn {turn}"
    return y.tobytes()


def loop(rank: Rank) -> None:
    """Steps without end."""
    turn = 0
    while True:
        step(rank, turn)
        if turn == 0 and rank.rank == 0:
            print("running", flush=True)
        turn += 1


def some(rank: Rank) -> None:
    """Two hundred steps; rank 0 prints what they gave."""
    results = hashlib.sha256(b"".join(step(rank, turn) for turn in range(200))).hexdigest()
    if rank.rank == 0:
        print(results, flush=True)


def lead(rank: Rank) -> None:
    """Rank 0 ends after a pause that is longer than the patience, and the others wait for its next step."""
    step(rank, 0)
    if rank.rank == 0:
        time.sleep(PATIENCE_S + 0.5)
    step(rank, 1)
    if rank.rank == 0:
        return
    step(rank, 2)


def think(rank: Rank) -> None:
    """The interpreter of rank 0 is busy for longer than ranks may be silent, before a step and after it."""
    for turn in range(2):
        if rank.rank == 0:
            C.PyDLL(None).sleep(4)  # holds the lock of the interpreter
        step(rank, turn)


def hang(rank: Rank) -> None:
    """The last rank hangs; its heart beats on."""
    while rank.rank == 0:
        step(rank, 0)
    step(rank, 0)
    while True:
        pass


def doze(rank: Rank) -> None:
    """The last rank sleeps where the others wait for it."""
    step(rank, 0)
    if rank.rank == rank.count - 1:
        time.sleep(60)
    step(rank, 1)


def toil(rank: Rank) -> None:
    """The last rank has to work for longer than it may sleep."""
    step(rank, 0)
    since = time.monotonic()
    while rank.rank == rank.count - 1 and time.monotonic() < since + 5:
        pass
    step(rank, 1)


def fail(rank: Rank) -> None:
    """Rank 1 raises in mid-run."""
    step(rank, 0)
    if rank.rank == 1:
        raise ValueError("no such token")
    step(rank, 1)


def crash(rank: Rank) -> None:
    """Rank 1 ends without a word."""
    step(rank, 0)
    if rank.rank == 1:
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(7)
    step(rank, 1)


PROGRAMS: dict[str, Callable[[Rank], None]] = {
    program.__name__: program for program in (loop, some, lead, think, hang, doze, toil, fail, crash)
}


def main(words: Sequence[str]) -> int:
    """``PROGRAM LIBRARY [different] [planned=3] [unready]``.

    With ``different`` the last rank opens another artifact, with ``unready`` it leaves before it is ready.
    """
    place = read_place()
    assert place
    last = place.rank == place.count - 1
    digest = hashlib.sha256(str("different" in words and last).encode()).digest()
    planned = 3 if "planned=3" in words else place.count
    member = None
    try:
        with join(place, digest, planned, BUFFER_BYTES, patience_s=PATIENCE_S, wait_s=10) as member:
            if "unready" in words and last:
                return 0
            rank = Rank(Path(words[1]), member)
            member.ready()
            PROGRAMS[words[0]](rank)
    except TapeoutError as error:
        if member is None or not member.supervised or not isinstance(error, RankError):
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
