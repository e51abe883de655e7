"""Number formats: what each block of bytes means, by name, by GGUF type and by safetensors dtype."""

from __future__ import annotations

from tapeout.compiler.formats.base import Carrier, Codes, Format
from tapeout.compiler.formats.floats import FLOATS
from tapeout.compiler.formats.fp4 import FP4
from tapeout.compiler.formats.fp8 import FP8
from tapeout.compiler.formats.int4 import INT4
from tapeout.compiler.formats.int8 import INT8
from tapeout.compiler.formats.iq import IQ
from tapeout.compiler.formats.iq4 import IQ4
from tapeout.compiler.formats.kquants import K_QUANTS
from tapeout.compiler.formats.legacy import LEGACY
from tapeout.runtime.errors import TapeoutError

__all__ = ["CARRIERS", "FORMATS", "Carrier", "Codes", "Format", "by_gguf_id", "by_safetensors", "row_bytes"]

FORMATS: dict[str, Format] = {**FLOATS, **LEGACY, **K_QUANTS, **IQ4, **INT4, **INT8, **FP8, **FP4}
CARRIERS: dict[str, Carrier] = {
    carrier.name: carrier
    for carrier in (
        Carrier("e4m3", 1, 1, safetensors="F8_E4M3"),
        Carrier("i32", 1, 4, safetensors="I32"),
        Carrier("i64", 1, 8, safetensors="I64"),
        Carrier("e8m0", 1, 1, safetensors="F8_E8M0"),
        Carrier("u8", 1, 1, safetensors="U8"),
        Carrier("i8", 1, 1, safetensors="I8"),
        Carrier("e2m1", 2, 1, safetensors="F4"),
        Carrier("gguf_nvfp4", 64, 36, gguf_id=40),
        *IQ,
    )
}
_KNOWN: tuple[Format | Carrier, ...] = (*FORMATS.values(), *CARRIERS.values())
_BY_SAFETENSORS = {known.safetensors: known.name for known in _KNOWN if known.safetensors is not None}


def row_bytes(name: str, k: int) -> int:
    """Bytes of ``k`` elements of a format or carrier. Raises ValueError where they are no whole number of blocks."""
    return (CARRIERS[name] if name in CARRIERS else FORMATS[name]).row_bytes(k)


def by_gguf_id(gguf_id: int) -> Format | Carrier:
    """The format or carrier of a GGUF tensor type. Raises TapeoutError naming the known ones."""
    for known in _KNOWN:
        if known.gguf_id == gguf_id:
            return known
    listed = ", ".join(f"{known.gguf_id} ({known.name})" for known in _KNOWN if known.gguf_id is not None)
    raise TapeoutError(f"unknown quantization type {gguf_id} in GGUF; known types: {listed}")


def by_safetensors(dtype: str) -> str:
    """The format or carrier of a safetensors dtype. Raises TapeoutError naming the known ones."""
    if dtype in _BY_SAFETENSORS:
        return _BY_SAFETENSORS[dtype]
    listed = ", ".join(_BY_SAFETENSORS)
    raise TapeoutError(f"unknown quantization type {dtype!r} in safetensors; known dtypes: {listed}")
