"""Number formats: what each block of bytes means, by name, by GGUF type and by safetensors dtype."""

from __future__ import annotations

from tapeout.compiler.formats.base import Codes, Format
from tapeout.compiler.formats.floats import FLOATS
from tapeout.compiler.formats.fp8 import FP8
from tapeout.compiler.formats.int4 import INT4
from tapeout.compiler.formats.kquants import K_QUANTS
from tapeout.compiler.formats.legacy import LEGACY
from tapeout.runtime.errors import TapeoutError

__all__ = ["CARRIERS", "FORMATS", "Codes", "Format", "by_gguf_id", "by_safetensors", "row_bytes"]

FORMATS: dict[str, Format] = {**FLOATS, **LEGACY, **K_QUANTS, **INT4, **FP8}
CARRIERS: dict[str, int] = {"e4m3": 1, "i32": 4, "i64": 8}
"""Bytes of an element of the types that carry a part of quantized weights (codes, zero points), by our name for them.

No weight is in one: what they mean follows from other tensors (``tapeout.compiler.checkpoints.quantized``).
"""
_CARRIED = {"F8_E4M3": "e4m3", "I32": "i32", "I64": "i64"}


def row_bytes(name: str, k: int) -> int:
    """Bytes of ``k`` elements of a format or carrier. Raises ValueError where they are no whole number of blocks."""
    return k * CARRIERS[name] if name in CARRIERS else FORMATS[name].row_bytes(k)


def by_gguf_id(gguf_id: int) -> Format:
    """The format of a GGUF tensor type. Raises TapeoutError naming the known ones."""
    for known in FORMATS.values():
        if known.gguf_id == gguf_id:
            return known
    listed = ", ".join(f"{known.gguf_id} ({name})" for name, known in FORMATS.items() if known.gguf_id is not None)
    raise TapeoutError(f"unknown quantization type {gguf_id} in GGUF; known types: {listed}")


def by_safetensors(dtype: str) -> str:
    """The format or carrier of a safetensors dtype. Raises TapeoutError naming the known ones."""
    names = {known.safetensors: name for name, known in FORMATS.items() if known.safetensors is not None} | _CARRIED
    if dtype in names:
        return names[dtype]
    listed = ", ".join(names)
    raise TapeoutError(f"unknown quantization type {dtype!r} in safetensors; known dtypes: {listed}")
