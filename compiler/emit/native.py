"""The native half of emission: pack.c and quantize.c as one library, built once, called without the GIL."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.formats.base import Bytes, Floats
from tapeout.compiler.zig import Zig, find_zig

SOURCES = ("pack.c", "quantize.c")
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
            ("tp_first_not_finite", long, (ctypes.c_int, pointer, long, long)),
            ("tp_error", None, (ctypes.c_int, pointer, pointer, long, pointer)),
            ("tp_decode", ctypes.c_int, (ctypes.c_int, pointer, pointer, long, long)),
            ("tp_encode", ctypes.c_int, (ctypes.c_int, pointer, pointer, long, long)),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def pack_tile16(self, format: str, rows: Bytes, k: int, out: Bytes) -> None:
        """Pack rows of ``k`` elements as tiles of 16; the last tile is filled up with zero rows."""
        assert rows.strides[1] == 1 and out.flags.c_contiguous
        stride, count = rows.strides[0], rows.shape[0]
        self._library.tp_pack_tile16(_gguf_id(format), rows.ctypes.data, stride, count, k, out.ctypes.data)

    def first_not_finite(self, format: str, rows: Bytes) -> int | None:
        """The first row that holds a NaN or infinite value (or scale), or None."""
        assert rows.flags.c_contiguous
        found: int = self._library.tp_first_not_finite(_gguf_id(format), rows.ctypes.data, rows.shape[1], rows.shape[0])
        return None if found < 0 else found

    def decode(self, format: str, rows: Bytes, k: int) -> Floats:
        """float32 [rows, k] of rows in ``format``."""
        assert rows.flags.c_contiguous
        out = np.empty((rows.shape[0], k), np.float32)
        result = self._library.tp_decode(_gguf_id(format), rows.ctypes.data, out.ctypes.data, rows.shape[0], k)
        assert result == 0, (format, rows.shape, k, result)
        return out

    def encode(self, format: str, values: Floats) -> Bytes:
        """Rows [rows, k] in ``format``. Raises ValueError saying why, without a place, if they do not fit it."""
        assert values.flags.c_contiguous and values.dtype == np.float32
        rows, k = values.shape
        out = np.empty((rows, FORMATS[format].row_bytes(k)), np.uint8)
        result = self._library.tp_encode(_gguf_id(format), values.ctypes.data, out.ctypes.data, rows, k)
        if result in _ENCODE_FAILURES:
            raise ValueError(_ENCODE_FAILURES[result])
        assert result == 0, (format, values.shape, result)
        return out

    def add_error(self, format: str, values: Floats, rows: Bytes, sums: npt.NDArray[np.float64]) -> None:
        """Add the error of ``rows`` against the values they encode: sums of (x - x')^2 and x^2, largest |x - x'|."""
        assert values.flags.c_contiguous and rows.flags.c_contiguous
        self._library.tp_error(_gguf_id(format), values.ctypes.data, rows.ctypes.data, values.size, sums.ctypes.data)


def load_native(cache: Path) -> Native:
    """The library, built into ``cache`` unless it is there. Raises TapeoutError without the ziglang package."""
    zig = find_zig()
    target = _MACHINES.get(platform.machine(), ())
    digest = hashlib.sha256(repr((zig.version, target, _FLAGS, _LINK)).encode())
    folder = Path(__file__).parent
    for name in SOURCES:
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


def _gguf_id(format: str) -> int:
    known = FORMATS[format].gguf_id
    assert known is not None, format
    return known
