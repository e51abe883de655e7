"""Runs CUDA C++ kernels on the CPU, from numpy arrays: the kernel's own source, compiled with zig against a shim.

``run`` launches a kernel. What shows: writes outside of an array, reads of arrays that another kernel writes before
``tp_wait()``, ends without it, deadlocks, copies nobody waits for, unwritten shared memory (it holds 0xFF), and, by
seeds, races.
"""

from __future__ import annotations

import ctypes as C
import functools
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tapeout.compiler.kernels.cuda.base import Define, GpuKernel

Array = npt.NDArray[np.generic]
Argument = Array | int | float | None

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCES = ROOT / "compiler" / "kernels" / "cuda" / "src"
CACHE = ROOT / "build" / "cuda_host"
GUARD = 4096
ALIGNMENT = 256
SECONDS = 60

# What no kernel of a graph but the last writes: it may be read before tp_wait(). All else is poison until then.
EARLY = frozenset(
    [
        *("w", "weight", "norm", "bias", "inv_freq", "q_norm", "k_norm"),
        *("tokens", "positions", "counts", "page_table", "row_segment", "out_row"),
        *("temperature", "top_p", "top_k", "seed", "sample_position"),
    ]
)
_FLAGS = (
    *(
        "-target",
        "x86_64-linux-gnu.2.17",
        "-mcpu=x86_64_v3",
        "-std=c++17",
        "-O2",
        "-g0",
        "-fPIC",
        "-fvisibility=hidden",
    ),
    *(
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-sanitize=all",
        "-fno-stack-protector",
        "-ffp-contract=off",
        "-U_FORTIFY_SOURCE",
    ),
    *("-fno-strict-aliasing", "-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas", "-Wno-pass-failed"),
)
_LINK = ("-target", "x86_64-linux-gnu.2.17", "-shared", "-nostdlib", "-s", "-Wl,-z,undefs", "-Wl,-Bsymbolic")


class LaunchError(AssertionError):
    """The emulation stopped a kernel."""


def supported() -> bool:
    """Whether this machine runs the code: x86-64 with AVX2, FMA and F16C."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return all(flag in flags for flag in ("avx2", "fma", "f16c"))


def define(name: str, value: Define) -> str:
    """The compiler flag of one define; floats keep all their bits and are of type float."""
    if isinstance(value, bool):
        return f"-D{name}={int(value)}"
    return f"-D{name}={value!r}f" if isinstance(value, float) else f"-D{name}={value}"


def run(
    kernel: GpuKernel,
    grid: tuple[int, int, int] | tuple[int, ...] | int,
    arguments: Mapping[str, Argument],
    seed: int = 0,
    sources: Path = SOURCES,
    early: frozenset[str] = EARLY,
    cluster: int = 1,
) -> None:
    """Launch a kernel; arrays are given by parameter name and changed in place, None is a null pointer.

    ``seed`` 0: threads run in order, each to its next barrier; another seed: in a random order, blocks too. ``early``
    are the parameters that hold data before ``tp_wait()``; ``cluster``: blocks along x that run together, as a cluster.
    Raises LaunchError saying what a thread did wrong.
    """
    library = _load(kernel, sources)
    names = [parameter.name for parameter in kernel.params]
    if sorted(names) != sorted(arguments):
        raise LaunchError(f"{kernel.name} takes {', '.join(names)}, given are {', '.join(arguments)}")
    _check_kinds(library, kernel)
    values = (C.c_uint64 * (len(names) + 1))()
    placed: list[_Placed] = []
    fill: list[int] = []
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if isinstance(value, np.ndarray):
            placed.append(_Placed(parameter.name, value, parameter.name in early))
            values[i] = placed[-1].address
            fill += placed[-1].fill
        else:
            values[i] = _scalar(parameter.type, value)
    shape = grid if isinstance(grid, tuple) else (grid,)
    extents = (C.c_uint * 3)(*shape, *(1,) * (3 - len(shape)))
    late = (C.c_uint64 * (len(fill) + 1))(*fill, 0)
    library.tp_host_run.restype = C.c_char_p
    failure = library.tp_host_run(
        extents, kernel.threads, kernel.shared, values, late, C.c_uint64(seed), SECONDS, int(kernel.pdl), cluster
    )
    if failure is not None:
        raise LaunchError(f"{kernel.name}: {failure.decode()}")
    for item in placed:
        item.finish(kernel.name)


def _scalar(kind: str, value: int | float | None) -> int:
    if kind == "f32":
        return int(np.float32(value or 0.0).view(np.uint32))
    if kind == "i32":
        return int(value or 0) & 0xFFFFFFFF
    assert value is None, "a pointer is an array or None"
    return 0


class _Placed:
    """A copy of an array between guards. Late ones hold poison until ``fill`` is carried out."""

    def __init__(self, name: str, array: Array, early: bool) -> None:
        assert array.flags.c_contiguous, f"{name} is not contiguous"
        self.name = name
        self.array = array
        size = array.nbytes
        raw = np.full(size + 2 * GUARD + ALIGNMENT, 0xFF, np.uint8)
        start = GUARD + -(raw.ctypes.data + GUARD) % ALIGNMENT
        self.body = raw[start : start + size]
        self.guards = (raw[:start], raw[start + size :])
        self.address = raw.ctypes.data + start
        self.fill: list[int] = []
        if early:
            self.body[:] = array.reshape(-1).view(np.uint8)
        elif size:
            self.source = array.copy()
            self.fill = [self.address, self.source.ctypes.data, size]

    def finish(self, kernel: str) -> None:
        """Check the guards and hand the result back."""
        for guard, where in zip(self.guards, ("before", "past"), strict=True):
            if not (guard == 0xFF).all():
                raise LaunchError(f"{kernel}: wrote {where} the array {self.name} of {self.array.nbytes} bytes")
        if self.array.flags.writeable:
            self.array.reshape(-1).view(np.uint8)[:] = self.body


def _check_kinds(library: C.CDLL, kernel: GpuKernel) -> None:
    library.tp_host_parameters.restype = C.c_char_p
    found = library.tp_host_parameters().decode()
    declared = "".join(parameter.type[0] for parameter in kernel.params)
    if found != declared:
        raise LaunchError(f"{kernel.name}: the source has parameters {found!r}, its descriptor {declared!r}")


def _load(kernel: GpuKernel, sources: Path) -> C.CDLL:
    return _library(kernel.source, kernel.name, tuple(define(*item) for item in kernel.defines), sources)


@functools.cache
def _library(source: str, name: str, defines: tuple[str, ...], sources: Path) -> C.CDLL:
    """The shared library of one kernel, compiled unless one of the same content is there."""
    files = [*sorted(sources.glob("*.cuh")), sources / source, *sorted(HERE.glob("cuda_host.[hc]*"))]
    text = "\0".join([*_FLAGS, *defines, name, *(path.read_text() for path in files)])
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            folder = Path(scratch)
            unit = folder / "kernel.cpp"
            unit.write_text(f'#include "cuda_host.h"\n#include "{source}"\nTP_HOST_ENTRY(TP_KERNEL)\n')
            flags = [*_FLAGS, f"-I{HERE}", f"-I{sources}", f"-DTP_KERNEL={name}", "-DTP_HOST=1", *defines]
            _zig([*flags, "-c", str(unit)], folder / "kernel.o")
            _zig([*_LINK, str(folder / "kernel.o"), str(_scheduler())], folder / "kernel.so")
            os.replace(folder / "kernel.so", path)
    return C.CDLL(str(path))


@functools.cache
def _scheduler() -> Path:
    text = "\0".join([*_FLAGS, *(path.read_text() for path in sorted(HERE.glob("cuda_host.[hc]*")))])
    path = CACHE / f"scheduler-{hashlib.sha256(text.encode()).hexdigest()[:24]}.o"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            made = Path(scratch) / "scheduler.o"
            _zig([*_FLAGS, f"-I{HERE}", "-c", str(HERE / "cuda_host.cpp")], made)
            os.replace(made, path)
    return path


def _zig(arguments: list[str], output: Path) -> None:
    place = importlib.util.find_spec("ziglang")
    assert place is not None and place.origin is not None
    caches = {name: str(CACHE / "zig") for name in ("ZIG_LOCAL_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR")}
    command = [str(Path(place.origin).parent / "zig"), "c++", *arguments, "-o", str(output)]
    result = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if result.returncode:
        raise LaunchError(f"the kernel does not compile for the host:\n{result.stderr[:6000]}")
