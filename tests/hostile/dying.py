"""A compile in a process of its own that dies, or waits, at a chosen moment; its jobs and pieces are small.

The process is forked from a server that has imported what a compile needs, so that many may be started.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tapeout.compiler import artifact, cli
from tapeout.compiler.emit import jobs, pieces

JOB_BYTES, PIECE_BYTES = 24_000, 4096

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["pytest", "tapeout.compiler.cli.app", "tapeout.compiler.driver", "tapeout.compiler.views"]
)


class Compile:
    """``tapeout compile`` under way in another process; the options are those of ``_run``."""

    def __init__(self, spec: Path, out: Path, *more: str, **options: Any) -> None:
        self._says = out.with_name(f"{out.name}.said")
        words = ["compile", str(spec), "-o", str(out), "--no-cache", *more]
        self._process: BaseProcess = _FORKS.Process(target=_run, args=(words, self._says), kwargs=options)
        self._process.start()

    def end(self, *codes: int) -> tuple[set[int], str]:
        """Wait for its end, with one of these codes. Returns the jobs of which it wrote pieces, and what it said."""
        self._process.join(300)
        said = self._says.with_name(f"{self._says.name}-{self._process.pid}")
        lines = said.read_text().splitlines()
        said.unlink()
        assert self._process.exitcode in codes, (self._process.exitcode, lines)
        numbers = {int(line.removeprefix("job ")) for line in lines if line.startswith("job ")}
        return numbers, "\n".join(line for line in lines if not line.startswith("job "))

    def wait_for(self, path: Path) -> None:
        """Wait until the process has made a file."""
        while not path.exists():
            assert self._process.is_alive()
            time.sleep(0.01)


def _run(
    words: list[str], says: Path, call: int = 0, after: int = 0, kind: int = signal.SIGKILL, gate: Path | None = None
) -> None:
    """Die in the ``call``-th of the calls that change the disk, or by signal ``kind`` ``after`` so many jobs.

    Nothing is written until ``gate`` exists, if it is given; GATE.reached says that this is waited for.
    """
    place = os.open(f"{says}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(place, 1)
    os.dup2(place, 2)
    jobs.JOB_BYTES, pieces.TASK_BYTES = JOB_BYTES, PIECE_BYTES
    ended = threading.Event()
    _watch_pieces(place, gate, ended)
    _die_after(after, kind, ended)
    _die_in(call)
    sys.exit(cli.main(words))


def _watch_pieces(place: int, gate: Path | None, ended: threading.Event) -> None:
    piece = jobs.JobWork.piece

    def watched(self: jobs.JobWork, *arguments: Any) -> Any:
        if gate is not None:
            gate.with_suffix(".reached").touch()
            while not gate.exists():
                time.sleep(0.01)
        if ended.is_set():
            time.sleep(0.2)  # the signal goes to another thread
        os.write(place, b"job %d\n" % self.job.number)
        return piece(self, *arguments)

    jobs.JobWork.piece = watched


def _die_after(count: int, kind: int, ended: threading.Event) -> None:
    append, numbers = jobs.Journal.append, itertools.count(1)

    def counted(self: jobs.Journal, result: jobs.JobResult) -> None:
        append(self, result)
        if next(numbers) == count:
            ended.set()
            os.kill(os.getpid(), kind)

    jobs.Journal.append = counted


def _die_in(call: int) -> None:
    """Of bytes that are written then, half arrive."""
    numbers = itertools.count(1)

    def dying(function: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def call_or_die(*arguments: Any, **options: Any) -> Any:
            if next(numbers) == call:
                if half:
                    half(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call_or_die

    pwrite, append = os.pwrite, jobs.Journal.append
    os.pwrite = dying(pwrite, lambda fd, data, offset: pwrite(fd, data[: len(data) // 2], offset))
    os.truncate, os.fsync, os.unlink = dying(os.truncate), dying(os.fsync), dying(os.unlink)
    jobs.Journal.append = dying(append, _torn)
    artifact._rename = dying(artifact._rename)


def _torn(journal: jobs.Journal, result: jobs.JobResult) -> None:
    before = journal._path.stat().st_size
    jobs.Journal._append(journal, {"job": result.to_json()})
    with journal._path.open("ab") as file:
        file.truncate((before + file.tell()) // 2)
