"""Number formats: what each block of bytes means, by name, by GGUF type and by safetensors dtype."""

from __future__ import annotations

from tapeout.compiler.formats.base import Codes, Format
from tapeout.compiler.formats.floats import FLOATS
from tapeout.compiler.formats.fp8 import FP8
from tapeout.compiler.formats.int4 import INT4
from tapeout.compiler.formats.kquants import K_QUANTS
from tapeout.compiler.formats.legacy import LEGACY
from tapeout.runtime.errors import TapeoutError

__all__ = ["FORMATS", "Codes", "Format", "by_gguf_id", "by_safetensors"]

FORMATS: dict[str, Format] = {**FLOATS, **LEGACY, **K_QUANTS, **INT4, **FP8}


def by_gguf_id(gguf_id: int) -> Format:
    """The format of a GGUF tensor type. Raises TapeoutError naming the known ones."""
    for known in FORMATS.values():
        if known.gguf_id == gguf_id:
            return known
    listed = ", ".join(f"{known.gguf_id} ({name})" for name, known in FORMATS.items() if known.gguf_id is not None)
    raise TapeoutError(f"unknown quantization type {gguf_id} in GGUF; known types: {listed}")


def by_safetensors(dtype: str) -> Format:
    """The format of a safetensors dtype. Raises TapeoutError naming the known ones."""
    for known in FORMATS.values():
        if known.safetensors == dtype:
            return known
    listed = ", ".join(known.safetensors for known in FORMATS.values() if known.safetensors is not None)
    raise TapeoutError(f"unknown quantization type {dtype!r} in safetensors; known dtypes: {listed}")
