"""Build CPU kernels for a target and call them through the artifact's ABI, for tests and benchmarks."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

SOURCES = Path(__file__).parents[2] / "compiler" / "kernels" / "cpu"
TARGETS = {"x86_64_v3": "x86_64_v3", "x86_64_v4": "x86_64_v4+avx512vnni"}
SCRATCH = 256 * 1024


class Launch(ctypes.Structure):
    _fields_ = [("kernel", ctypes.c_int32), ("reserved", ctypes.c_int32), ("arg", ctypes.c_int64 * 15)]


class Step(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int32),
        ("segments", ctypes.c_int32),
        ("out_rows", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("row_segment", ctypes.c_void_p),
        ("segment", ctypes.c_void_p),
        ("out_row", ctypes.c_void_p),
    ]


_TASKS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch), ctypes.POINTER(Step))
_RUN = ctypes.CFUNCTYPE(None, ctypes.POINTER(Launch), ctypes.POINTER(Step), ctypes.c_int, ctypes.c_void_p)


class Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tasks", _TASKS), ("run", _RUN)]


_FLAGS = {"x86_64_v3": ("avx2", "fma", "f16c"), "x86_64_v4": ("avx512_vnni", "avx512bw", "avx512vl")}


def supported(target: str) -> bool:
    """Whether this machine runs code of the target."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return all(flag in flags for flag in _FLAGS[target])


def build(sources: list[tuple[str, str]], target: str, folder: Path) -> Path:
    """Compile (template, format) pairs to one shared library and return its path."""
    zig = [sys.executable, "-m", "ziglang", "cc", "-O3", "-target", "x86_64-linux-gnu.2.17", f"-mcpu={TARGETS[target]}"]

    def compile_one(item: tuple[str, str]) -> str:
        template, name = item
        out = folder / f"{template}_{name}.{target}.o"
        flags = ["-Wall", "-Wextra", "-Werror", "-fPIC", f"-DTP_FORMAT={name}"]
        subprocess.run([*zig, *flags, "-c", str(SOURCES / f"{template}.c"), "-o", str(out)], check=True)
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    library = folder / f"kernels.{target}.so"
    subprocess.run([*zig, "-shared", "-o", str(library), *objects], check=True)
    return library


def load(library: Path, name: str) -> Kernel:
    """The kernel ``name`` of a library made by ``build``."""
    return Kernel.in_dll(ctypes.CDLL(str(library)), f"tp_kernel_{name}")


def aligned(data: npt.NDArray, extra: int = 0) -> npt.NDArray[np.uint8]:
    """A copy of an array's bytes at a 4096-byte boundary, followed by ``extra`` bytes."""
    raw = np.empty(data.nbytes + extra + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    out = raw[start : start + data.nbytes + extra]
    out[: data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return out


def argument(value: int | float | npt.NDArray | None) -> int:
    """A launch argument: the address of an array, an integer, or the bits of a double."""
    if value is None:
        return 0
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else value


def launch(*values: int | float | npt.NDArray | None) -> Launch:
    """A launch with the given arguments; the arrays must outlive it."""
    out = Launch()
    for i, value in enumerate(values):
        out.arg[i] = argument(value)
    return out


def run(kernel: Kernel, call: Launch, step: Step, shuffled: bool = False) -> None:
    """Run all tasks of one launch on this thread, in ascending or in some other order."""
    scratch = aligned(np.full(SCRATCH, 0xFF, np.uint8))
    count = kernel.tasks(call, step)
    tasks = np.random.default_rng(0).permutation(count) if shuffled else range(count)
    for task in tasks:
        kernel.run(call, step, int(task), scratch.ctypes.data)
