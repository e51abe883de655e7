"""A process in which a build runs Triton, whose compiler holds the interpreter's lock while it works."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import tempfile
from typing import IO, Any

from tapeout.compiler.kernels.cuda.base import Cubin, GpuKernel
from tapeout.compiler.kernels.cuda.triton_build import compile_triton, first_lines
from tapeout.runtime.errors import TapeoutError


class TritonWorker:
    """A process that compiles one kernel after the other."""

    def __init__(self) -> None:
        # Triton's own variables change what is compiled
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - close() does
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=environment,
        )

    def compile(self, kernel: GpuKernel, arch: str) -> Cubin:
        """The compiled kernel. Raises the worker's TapeoutError, and one of its own when the process ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        start = self._complaints.seek(0, os.SEEK_END)
        answer = None
        with contextlib.suppress(BrokenPipeError):
            _send(self._process.stdin, (kernel, arch))
            answer = _receive(self._process.stdout)
        if isinstance(answer, Cubin):
            return answer
        self._complaints.seek(start)
        said = first_lines(self._complaints.read().decode(errors="replace"))
        if answer is None:
            raise TapeoutError(f"compiling {kernel.source} of {kernel.name} for {arch} ended Triton's process: {said}")
        raise TapeoutError(f"{answer}; {said}" if said else answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._complaints.close()


def serve() -> None:
    """Compile what arrives on standard input until it closes. The answer is a Cubin, or an error's text."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed must not get between the answers
    while (task := _receive(sys.stdin.buffer)) is not None:
        kernel, arch = task
        try:
            answer: Cubin | str = compile_triton(kernel, arch)
        except TapeoutError as error:
            answer = str(error)
        _send(answers, answer)


def _send(stream: IO[bytes], value: object) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """The next value, or None at the end. Both ends are this program, so pickle is safe here."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0]))
