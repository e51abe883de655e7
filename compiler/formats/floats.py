"""Plain floating point: F32, F16 and BF16, little-endian, one element a block."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats.affine import check_finite
from tapeout.compiler.formats.base import Bytes, Floats, Format


def _view(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(data).view(dtype)


def _decode_f32(data: Bytes) -> Floats:
    return np.require(_view(data, "<f4"), np.float32, ["C", "A"])


def _encode_f32(data: Floats) -> Bytes:
    return np.ascontiguousarray(data, "<f4").view(np.uint8)


def _decode_f16(data: Bytes) -> Floats:
    return _view(data, "<f2").astype(np.float32)


def _encode_f16(data: Floats) -> Bytes:
    check_finite(data)
    with np.errstate(over="ignore"):
        rounded = np.ascontiguousarray(data.astype("<f2"))
    if np.isinf(rounded).any():
        raise ValueError(
            f"the value {np.abs(data).max():g} is too large for f16, whose largest is 65504; bf16 would hold it"
        )
    return rounded.view(np.uint8)


def _decode_bf16(data: Bytes) -> Floats:
    return (_view(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _encode_bf16(data: Floats) -> Bytes:
    """The upper half of float32, rounded to nearest even."""
    check_finite(data)
    word = np.ascontiguousarray(data).view(np.uint32)
    rounded = (word + (np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    if ((rounded & np.uint32(0x7FFF)) == 0x7F80).any():
        raise ValueError(f"the value {np.abs(data).max():g} rounds to infinity in bf16; f32 would hold it")
    return rounded.astype("<u2").view(np.uint8)


FLOATS: dict[str, Format] = {
    "f32": Format("f32", 1, 4, _decode_f32, _encode_f32, gguf_id=0, safetensors="F32"),
    "f16": Format("f16", 1, 2, _decode_f16, _encode_f16, gguf_id=1, safetensors="F16"),
    "bf16": Format("bf16", 1, 2, _decode_bf16, _encode_bf16, gguf_id=30, safetensors="BF16"),
}
