"""Starts the ranks of a run as processes of this machine, and ends all of them when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

from tapeout.runtime.ranks import environment
from tapeout.runtime.ranks.segment import PATIENCE_S, TICK, Reason, Segment, State, Watch

GRACE_S = 1.0  # for ranks to end by themselves once the run is over
_POLL_S = 0.02
_QUOTED = 300  # characters of a failed rank's last words


class Ranks:
    """The processes of a run. As a context manager it leaves none of them behind."""

    def __init__(self, segment: Segment, processes: Sequence[subprocess.Popen[bytes]], stderr: Sequence[int]) -> None:
        self._segment, self.processes, self._stderr = segment, processes, stderr

    def wait(self) -> int:
        """Wait for rank 0, which leads, and return its exit code; the others end with it.

        Raises RankError that names the rank when one is killed, fails, gives no sign of life or keeps the others
        waiting; no rank is left then. That rank 0 has ended while others wait for it is how runs end.
        """
        watch, look = Watch(self._segment), time.monotonic() + TICK
        while not self._segment.fault:
            over = self.processes[0].poll() is not None  # before the look at how each ended
            self._blame()
            if over:
                break
            if time.monotonic() > look:
                watch.look()
                look = time.monotonic() + TICK
            time.sleep(_POLL_S)
        self._end()
        if self._segment.fault not in (None, (Reason.LEFT, 0)):
            raise self._segment.error()
        return self.processes[0].returncode

    def _blame(self) -> None:
        """State a fault if a process ended as none should."""
        for rank, process in enumerate(self.processes):
            code = process.poll()
            state = self._segment.shared.rank[rank].state
            if code is None or state == State.LEFT or (state == State.ABSENT and code >= 0 and rank * code == 0):
                continue
            if state == State.ABSENT and code > 0 and self._leader_refuses():
                continue
            if code < 0:
                how = f"was killed by {_signal_name(-code)}; the other ranks were ended"
            else:
                how = f"ended with exit code {code}{self._last_words(rank)}"
            self._segment.end(Reason.FAILED, rank, how)

    def _leader_refuses(self) -> bool:
        """Whether rank 0 ends before it joins, within the grace: it says what is wrong, for all ranks."""
        deadline = time.monotonic() + GRACE_S
        leader = self._segment.shared.rank[0]
        while leader.state == State.ABSENT and self.processes[0].poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return leader.state == State.ABSENT and bool(self.processes[0].poll())

    def _last_words(self, rank: int) -> str:
        """The last line that a rank wrote to standard error."""
        if self._stderr[rank] < 0:
            return ""
        end = os.lseek(self._stderr[rank], 0, os.SEEK_END)
        tail = os.pread(self._stderr[rank], 4096, max(0, end - 4096)).decode(errors="replace").strip()
        return f": {tail.splitlines()[-1][:_QUOTED]}" if tail else ""

    def _end(self) -> None:
        """Let the processes end by themselves for a moment, then kill them; stopped ones too."""
        deadline = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """Kill what still runs and give everything back."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for fd in self._stderr:
            if fd >= 0:
                os.close(fd)
        self._stderr = [-1] * len(self._stderr)
        self._segment.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):  # rank 0 has had it too, and may want to say what it did
            self._end()
        self.close()


def _signal_name(number: int) -> str:
    """SIGKILL and the like; real-time signals have no names."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def start_ranks(
    count: int,
    command: Sequence[str],
    buffer_bytes: int,
    *,
    patience_s: float = PATIENCE_S,
    environ: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> Ranks:
    """Start ``command`` once for each rank; each calls ``join``, with what ``read_place`` reads.

    Rank 0 has this process's standard streams. The others read nothing, their output is dropped, and the last line of
    their standard error is quoted if they fail. With ``stdin`` every rank reads that. The ranks die with the thread
    that calls this, so call it from one that stays. Raises TapeoutError.
    """
    segment = Segment.create(count, buffer_bytes, patience_s)
    processes: list[subprocess.Popen[bytes]] = []
    stderr: list[int] = []
    ranks = Ranks(segment, processes, stderr)
    try:
        for rank in range(count):
            stderr.append(os.memfd_create(f"tapeout-rank-{rank}") if rank else -1)
            variables = {
                environment.RANK: str(rank),
                environment.RANKS: str(count),
                environment.SEGMENT: str(segment.fd),
                environment.PARENT: str(os.getpid()),
            }
            with _input(stdin) as file:
                process = subprocess.Popen(
                    list(command),
                    env={**(os.environ if environ is None else environ), **variables},
                    pass_fds=(segment.fd,),
                    stdin=file or (subprocess.DEVNULL if rank else None),
                    stdout=subprocess.DEVNULL if rank else None,
                    stderr=stderr[rank] if rank else None,
                )
            processes.append(process)
    except BaseException:
        ranks.close()
        raise
    return ranks


def _input(text: bytes | None) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    """A file of its own for one rank's standard input, where there is something to read."""
    if text is None:
        return contextlib.nullcontext()
    file = os.fdopen(os.memfd_create("tapeout-stdin"), "w+b")
    file.write(text)
    file.seek(0)
    return file


def run_ranks(
    count: int,
    command: Sequence[str],
    buffer_bytes: int,
    *,
    patience_s: float = PATIENCE_S,
    stdin: bytes | None = None,
) -> int:
    """Start ``command`` once for each rank and wait. Returns rank 0's exit code; see ``Ranks.wait``."""
    with start_ranks(count, command, buffer_bytes, patience_s=patience_s, stdin=stdin) as ranks:
        return ranks.wait()
