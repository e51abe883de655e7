"""The step engine and the simple kernels, built by the real toolchain and called through the artifact's C interface."""

from __future__ import annotations

import ctypes as C
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tapeout.compiler.kernels import simple
from tapeout.compiler.kernels.toolchain import SOURCES, Unit, build_libraries
from tapeout.compiler.stages import KernelEntry
from tapeout.runtime.cpu import Launch, Sampling, Segment, StepStruct

ENTRIES: tuple[KernelEntry, ...] = (
    simple.RMSNORM_F32,
    simple.RMSNORM_X8,
    simple.RMSNORM_ADD,
    simple.QUANTIZE_X8,
    simple.ROPE_TABLE,
    *simple.GATED.values(),
    simple.ADD_F32,
    simple.GATHER_F32,
    KernelEntry("softcap_f32", "elementwise", ("x", "k", "cap"), "elementwise.c", ()),
    *(simple.rope_kv(dtype) for dtype in ("f16", "f32")),
    *(simple.attention(dtype) for dtype in ("f16", "f32")),
    simple.ATTENTION_COMBINE,
)
Array = npt.NDArray[np.generic]


def supported(target: str) -> bool:
    """Whether this machine runs code of the target."""
    flags = Path("/proc/cpuinfo").read_text().split()
    need = ("avx2", "fma", "f16c") if target == "x86_64_v3" else ("avx512_vnni", "avx512bw", "avx512vl", "avx512dq")
    return all(flag in flags for flag in need)


def build(
    folder: Path, targets: Sequence[str], entries: Sequence[KernelEntry] = ENTRIES, sources: Path = SOURCES
) -> None:
    """Write ``cpu-<target>.so`` of each target to the folder."""
    units = [Unit("engine.c"), Unit("sample.c"), *(Unit(entry.source, entry.defines) for entry in entries)]
    libraries = build_libraries(units, [e.name for e in entries], targets, folder / "cache", sources=sources)
    for target, data in libraries.items():
        (folder / f"cpu-{target}.so").write_bytes(data)


def argument(value: float | Array | None) -> int:
    """A launch argument: the address of an array, an integer, or the bits of a double."""
    if value is None:
        return 0
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return struct.unpack("<q", struct.pack("<d", value))[0] if isinstance(value, float) else int(value)


def poison(*shape: int) -> npt.NDArray[np.float32]:
    """An array in which a value that nobody wrote shows: all NaN."""
    return np.full(shape, np.nan, np.float32)


@dataclass
class Step:
    """A tp_step and the arrays it points at."""

    native: StepStruct
    kept: list[Array]


def make_step(segments: Sequence[tuple[int, int, Sequence[int]]], out_rows: Sequence[int] = ()) -> Step:
    """A step from (position of the first row, rows, page table) of each sequence; their slots are 0, 1, …"""
    native, kept = StepStruct(), []
    table = (Segment * len(segments))()
    positions: list[int] = []
    owners: list[int] = []

    def pointer(values: Sequence[int]) -> C._Pointer[C.c_int32]:
        array = np.array([*values, 0], np.int32)
        kept.append(array)
        return array.ctypes.data_as(C.POINTER(C.c_int32))

    for i, (position, rows, pages) in enumerate(segments):
        table[i].row, table[i].rows, table[i].position = len(positions), rows, position
        table[i].slot, table[i].pages = i, pointer(pages)
        positions += range(position, position + rows)
        owners += [i] * rows
    native.rows, native.segments, native.out_rows = len(positions), len(segments), len(out_rows)
    native.positions, native.row_segment, native.out_row = pointer(positions), pointer(owners), pointer(out_rows)
    native.segment = table
    return Step(native, kept)


def rows_step(rows: int, out_rows: Sequence[int] = ()) -> Step:
    """A step of one sequence from position 0, for kernels that look at rows only."""
    return make_step([(0, rows, [0])], out_rows)


class Native:
    """One library and one engine of it."""

    def __init__(self, library: Path, threads: int = 1) -> None:
        self.library = C.CDLL(str(library))
        pointer, integer = C.c_void_p, C.c_int
        self.library.tp_open.restype, self.library.tp_open.argtypes = pointer, [integer]
        self.library.tp_close.restype, self.library.tp_close.argtypes = None, [pointer]
        self.library.tp_kernel_name.restype = C.c_char_p
        self.library.tp_run_one.argtypes = [pointer, pointer, pointer]
        lists = [pointer, integer, pointer, integer]
        self.library.tp_run.argtypes = [pointer, *lists, pointer, pointer, integer, pointer]
        self.library.tp_sample.argtypes = [pointer, integer, pointer]
        self.engine = self.library.tp_open(threads)
        assert self.engine
        self.index: dict[str, int] = {}
        while name := self.library.tp_kernel_name(len(self.index)):
            self.index[name.decode()] = len(self.index)

    def close(self) -> None:
        """End the workers."""
        self.library.tp_close(self.engine)
        self.engine = None

    def launch(self, name: str, *arguments: float | Array | None) -> Launch:
        """A launch; the arrays among its arguments must outlive it."""
        launch = Launch()
        launch.kernel = self.index[name]
        for i, value in enumerate(arguments):
            launch.arg[i] = argument(value)
        return launch

    def call(self, name: str, step: Step, *arguments: float | Array | None) -> None:
        """Run one launch."""
        launch = self.launch(name, *arguments)
        assert self.library.tp_run_one(self.engine, C.byref(launch), C.byref(step.native)) == 0

    def run(
        self,
        step: Step,
        body: Sequence[Launch],
        head: Sequence[Launch] = (),
        logits: Array | None = None,
        sampling: C.Array[Sampling] | None = None,
    ) -> int:
        """Run a whole step; returns the engine's code."""
        lists = [(Launch * len(launches))(*launches) for launches in (body, head)]
        where, vocab = (None, 0) if logits is None else (logits.ctypes.data, logits.shape[-1])
        return self.library.tp_run(
            *(self.engine, lists[0], len(body), lists[1], len(head)), C.byref(step.native), where, vocab, sampling
        )

    def sample(self, logits: npt.NDArray[np.float32], **settings: float) -> Sampling:
        """Choose one token."""
        sampling = Sampling(**{"top_p": 1.0, **settings})
        code = self.library.tp_sample(logits.ctypes.data, logits.size, C.byref(sampling))
        assert code == 0, code
        return sampling
