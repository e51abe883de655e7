"""The native half of emission: the C files here as one library, built once, called without the GIL."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.formats.base import Bytes, Floats
from tapeout.compiler.layouts import LAYOUTS
from tapeout.compiler.zig import Zig, find_zig

SOURCES = ("blocks.c", "pack.c", "planes.c", "quantize.c", "int4.c", "fp8.c", "fp4.c")
HEADERS = ("blocks.h",)
_MACHINES = {"x86_64": ("-mcpu=x86_64_v3", "-target", "x86_64-linux-gnu.2.17")}
# Contraction stays off: encoders must give the bytes of their numpy references.
_FLAGS = (
    *("-O3", "-std=gnu11", "-g0", "-fPIC", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-trapping-math", "-fno-sanitize=all", "-fno-stack-protector", "-Wall", "-Wextra", "-Werror"),
)
_LINK = ("-shared", "-nostdlib", "-s", "-Wl,-z,undefs", "-Wl,--build-id=none")
_ENCODE_FAILURES = {3: "it holds a NaN or an infinity", 4: "a value is too large for the format"}


class Native:
    """The library's functions on numpy arrays. Rows are uint8 [rows, row_bytes], contiguous along the last axis."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        pointer, long = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
            ("tp_pack_tile16", None, (ctypes.c_int, pointer, long, long, long, pointer)),
            ("tp_pack_planes", None, (ctypes.c_int, pointer, long, long, long, pointer, pointer, ctypes.c_int)),
            ("tp_first_not_finite", long, (ctypes.c_int, pointer, long, long)),
            ("tp_error", None, (ctypes.c_int, pointer, pointer, long, pointer)),
            ("tp_decode", ctypes.c_int, (ctypes.c_int, pointer, pointer, long, long)),
            ("tp_encode", ctypes.c_int, (ctypes.c_int, pointer, pointer, long, long)),
            ("tp_encode_under", ctypes.c_int, (ctypes.c_int, pointer, pointer, long, long, ctypes.c_float)),
            ("tp_largest", ctypes.c_float, (pointer, long, long, long)),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def pack(self, layout: str, format: str, rows: Bytes, k: int, outs: Sequence[Bytes]) -> None:
        """Pack rows of ``k`` elements into the spans that they own of the layout's parts (``Part.span``)."""
        if layout == "tile16":
            self.pack_tile16(format, rows, k, outs[0])
        elif layout == "planes":
            self.pack_planes(format, rows, k, outs)
        else:
            outs[0][:] = rows.reshape(-1)

    def pack_tile16(self, format: str, rows: Bytes, k: int, out: Bytes) -> None:
        """Pack rows of ``k`` elements as tiles of 16; the last tile is filled up with zero rows."""
        assert rows.strides[1] == 1 and out.flags.c_contiguous
        stride, count = rows.strides[0], rows.shape[0]
        self._library.tp_pack_tile16(_number(format), rows.ctypes.data, stride, count, k, out.ctypes.data)

    def pack_planes(self, format: str, rows: Bytes, k: int, outs: Sequence[Bytes]) -> None:
        """Pack rows into as many rows of the code planes and of the scales, the last of ``outs``.

        Where rows share scales the first of them starts a tile, and the scales take those of tiles that begin; they
        are empty where none does.
        """
        assert rows.strides[1] == 1 and all(out.flags.c_contiguous for out in outs)
        count = len(rows)
        parts = LAYOUTS["planes"].parts(count, k, format)
        places = (ctypes.c_void_p * len(outs))(*(out.ctypes.data if out.size else None for out in outs))
        lengths = (ctypes.c_int64 * len(outs))(*(part.nbytes for part in parts))
        arguments = (rows.ctypes.data, rows.strides[0], count, k, places, lengths, len(outs))
        self._library.tp_pack_planes(_number(format), *arguments)

    def first_not_finite(self, format: str, rows: Bytes) -> int | None:
        """The first row that holds a NaN or infinite value (or scale), or None."""
        assert rows.flags.c_contiguous
        found: int = self._library.tp_first_not_finite(_number(format), rows.ctypes.data, rows.shape[1], rows.shape[0])
        return None if found < 0 else found

    def decode(self, format: str, rows: Bytes, k: int) -> Floats:
        """float32 [rows, k] of rows in ``format``."""
        assert rows.flags.c_contiguous
        out = np.empty((rows.shape[0], k), np.float32)
        result = self._library.tp_decode(_number(format), rows.ctypes.data, out.ctypes.data, rows.shape[0], k)
        assert result == 0, (format, rows.shape, k, result)
        return out

    def largest(self, values: Floats) -> float:
        """The largest magnitude; infinity when one is not finite."""
        assert values.flags.c_contiguous and values.dtype == np.float32
        return float(self._library.tp_largest(values.ctypes.data, values.size, 1, values.size))

    def encode_under(self, format: str, values: Floats, largest: float) -> Bytes:
        """Some rows of a tensor in a format whose one scale follows from the tensor's largest magnitude."""
        assert values.flags.c_contiguous and values.dtype == np.float32
        rows, k = values.shape
        out = np.empty((rows, FORMATS[format].row_bytes(k)), np.uint8)
        if self._library.tp_encode_under(_number(format), values.ctypes.data, out.ctypes.data, rows, k, largest):
            raise ValueError(_ENCODE_FAILURES[3])
        return out

    def encode(self, format: str, values: Floats) -> Bytes:
        """Rows [rows, k] in ``format``, whole tiles of them where rows share scales.

        Raises ValueError saying why, without a place, if they do not fit it.
        """
        assert values.flags.c_contiguous and values.dtype == np.float32
        rows, k = values.shape
        out = np.empty((rows, FORMATS[format].row_bytes(k)), np.uint8)
        result = self._library.tp_encode(_number(format), values.ctypes.data, out.ctypes.data, rows, k)
        if result in _ENCODE_FAILURES:
            raise ValueError(_ENCODE_FAILURES[result])
        assert result == 0, (format, values.shape, result)
        return out

    def add_error(self, format: str, values: Floats, rows: Bytes, sums: npt.NDArray[np.float64]) -> None:
        """Add the error of ``rows`` against the values they encode: sums of (x - x')^2 and x^2, largest |x - x'|."""
        assert values.flags.c_contiguous and rows.flags.c_contiguous
        self._library.tp_error(_number(format), values.ctypes.data, rows.ctypes.data, values.size, sums.ctypes.data)


def load_native(cache: Path) -> Native:
    """The library, built into ``cache`` unless it is there. Raises TapeoutError without the ziglang package."""
    zig = find_zig()
    target = _MACHINES.get(platform.machine(), ())
    digest = hashlib.sha256(repr((zig.version, target, _FLAGS, _LINK)).encode())
    folder = Path(__file__).parent
    for name in (*SOURCES, *HEADERS):
        digest.update((folder / name).read_bytes())
    path = cache.absolute() / f"emit-{digest.hexdigest()[:32]}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _build(zig, target, path)
    return Native(path)


def _build(zig: Zig, target: tuple[str, ...], path: Path) -> None:
    sources, failure = Path(__file__).parent, "compiling the emission library failed"
    with tempfile.TemporaryDirectory(prefix="emit-", dir=path.parent) as name:
        scratch = Path(name)
        objects = [scratch / f"{source}.o" for source in SOURCES]
        for source, output in zip(SOURCES, objects, strict=True):
            zig.cc([*_FLAGS, *target, "-c", source], output, scratch=scratch, cwd=sources, failure=failure)
        zig.cc([*target, *_LINK, *map(str, objects)], path, scratch=scratch, cwd=scratch, failure=failure)


def _number(format: str) -> int:
    return FORMATS[format].number
