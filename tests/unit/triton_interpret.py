"""Runs Triton templates in Triton's interpreter, in a process of their own.

The interpreter is chosen by a variable when ``triton`` is first imported, and other tests of the same process compile
with Triton: so a child process interprets, and the two never meet. The child takes (kernel, grid, arrays) and answers
with the arrays as the launch left them.

    with Interpreter() as interpreter:              # or the module-scoped fixture below
        out = interpreter.launch(kernel, grid, x=x, w=w, y=y, counts=counts)["y"]

Arrays are numpy; bf16 travels as uint16 (``bf16_bits`` and ``bf16_values`` convert) and is typed by ``Param.dtype``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pytest

from tapeout.compiler.kernels.cuda.base import GpuKernel

Array = npt.NDArray[Any]
_PACKAGE = "tapeout.compiler.kernels.cuda"


def bf16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """float32 to bf16 by round to nearest even, as bits. Values are finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def bf16_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers that bf16 bits stand for."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class Interpreter:
    """The child process. A launch that fails raises AssertionError with the child's traceback."""

    def __enter__(self) -> Interpreter:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        self._child = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin and self._child.stdout
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait()

    def launch(self, kernel: GpuKernel, grid: tuple[int, ...], **arrays: Array) -> dict[str, Array]:
        """Run every block of one launch, in order. INTERPRET and PDL are set as the interpreter needs them.

        Takes one array for each of the kernel's parameters; returns copies as the kernel left them.
        """
        assert self._child.stdin and self._child.stdout
        assert [p.name for p in kernel.params] == list(arrays), "arrays in the order of the kernel's parameters"
        _send(self._child.stdin, (kernel, grid, arrays))
        answer = _receive(self._child.stdout)
        assert not isinstance(answer, str), answer
        assert answer is not None, "the interpreter's process ended"
        return answer


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """One child for a test module: import this name into the module."""
    with Interpreter() as running:
        yield running


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _let_scalars_bound_loops()
    while (task := _receive(sys.stdin.buffer)) is not None:
        try:
            _send(answers, _launch(*task))
        except BaseException:
            import traceback

            _send(answers, traceback.format_exc())


def _let_scalars_bound_loops() -> None:
    """The interpreter holds scalars in arrays of one element, which numpy 2.4 no longer takes for ``int``."""
    from triton.runtime import interpreter as module

    original = module._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    module._patch_lang_tensor = patch


def _launch(kernel: GpuKernel, grid: tuple[int, ...], arrays: dict[str, Array]) -> dict[str, Array]:
    import torch

    types = {"bf16": torch.bfloat16, "f16": torch.float16, "fp16": torch.float16}
    module, _, name = kernel.source.partition(":")
    function = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
    defines: dict[str, Any] = {**dict(kernel.defines), "INTERPRET": True, "PDL": False, "ARCH": 90}
    defines = {key: value for key, value in defines.items() if key in function.arg_names}
    held = {key: np.array(value) for key, value in arrays.items()}
    tensors = {
        p.name: torch.from_numpy(held[p.name]).view(types[p.dtype])
        if p.dtype in types and held[p.name].dtype != np.float16
        else torch.from_numpy(held[p.name])
        for p in kernel.params
    }
    with np.errstate(all="ignore"):
        function[grid](**tensors, **defines)
    return held


def _send(stream: BinaryIO | Any, value: object) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: BinaryIO | Any) -> Any:
    header = stream.read(8)
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0])) if len(header) == 8 else None


if __name__ == "__main__":
    _serve()
