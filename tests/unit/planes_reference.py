"""Layout planes read back slowly from its description, as the witness of packers and GPU kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import tile16_reference
import torch

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

# bits of the planes; elements a scale d, elements a group; zero; which fields a row of scales has, in order
SHAPES: dict[str, tuple[tuple[int, ...], int, int, int, str]] = {
    "q4_0": ((4,), 32, 32, 8, "d"),
    "q4_1": ((4,), 32, 32, 0, "d m"),
    "q5_0": ((4, 1), 32, 32, 16, "d"),
    "q5_1": ((4, 1), 32, 32, 0, "d m"),
    "q8_0": ((8,), 32, 32, 0, "d"),
    "q2_k": ((2,), 256, 16, 0, "d m s n"),
    "q3_k": ((2, 1), 256, 16, 4, "d s"),
    "q4_k": ((4,), 256, 32, 0, "d m s n"),
    "q5_k": ((4, 1), 256, 32, 0, "d m s n"),
    "q6_k": ((4, 2), 256, 16, 32, "d s"),
    "int4_g32": ((4,), 32, 32, 8, "d"),
    "int4_g64": ((4,), 64, 64, 8, "d"),
    "int4_g128": ((4,), 128, 128, 8, "d"),
    "int4_g128_zp": ((4,), 128, 128, 0, "d z"),
    "int4_g32_zp": ((4,), 32, 32, 0, "d z"),
    "int4_g64_zp": ((4,), 64, 64, 0, "d z"),
    "int8_g32": ((8,), 32, 32, 0, "d"),
    "int8_g128": ((8,), 128, 128, 0, "d"),
    "int4_g32_zp_f16": ((4,), 32, 32, 0, "d z"),
    "int4_g128_zp_f16": ((4,), 128, 128, 0, "d z"),
}

random_gguf_rows = tile16_reference.random_rows
dequantize = tile16_reference.dequantize


def torch_e4m3(x: F32) -> F32:
    """Values rounded to e4m3fn by torch."""
    return torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()


def read_back(format: str, data: U8, rows: int, k: int) -> F32:
    """float32 [rows, k] of a weight in layout planes, one float32 rounding an operation."""
    if format.startswith("fp8"):
        return _read_fp8(format, data, rows, k)
    widths, super, group, zero, fields = SHAPES[format]
    offset, low = 0, 0
    codes = np.zeros((rows, k), np.int32)
    for width in widths:
        row_bytes = _up(k * width // 8, 16)
        plane = data[offset : offset + rows * row_bytes].reshape(rows, row_bytes)
        codes |= _codes(plane[:, : k * width // 8], width, k) << low
        assert not plane[:, k * width // 8 :].any()
        offset, low = _up(offset + rows * row_bytes, 256), low + width
    if widths == (8,):
        codes = codes.astype(np.uint8).view(np.int8).reshape(rows, k).astype(np.int32)
    sizes = {"d": 2 * k // super, "m": 2 * k // super, "s": k // group, "n": k // group, "z": k // group}
    row_bytes = _up(sum(sizes[name] for name in fields.split()), 16)
    plane = data[offset : offset + rows * row_bytes].reshape(rows, row_bytes)
    found: dict[str, U8] = {}
    at = 0
    for name in fields.split():
        found[name] = np.ascontiguousarray(plane[:, at : at + sizes[name]])
        at += sizes[name]
    assert not plane[:, at:].any()
    return _values(format, codes - zero, found, group)


def _values(format: str, codes: npt.NDArray[np.int32], found: dict[str, U8], group: int) -> F32:
    k = codes.shape[1]

    def spread(field: npt.NDArray) -> F32:
        return np.repeat(field.astype(np.float32), k // field.shape[1], axis=1)

    upper = format.startswith("int") and not format.endswith("_f16")
    bits = found["d"].view("<u2")
    scale = spread((bits.astype(np.uint32) << 16).view(np.float32) if upper else bits.view(np.float16))
    if "s" in found:
        scale = scale * spread(found["s"].view(np.int8))
    if "z" in found:
        codes = codes - np.repeat(found["z"].astype(np.int32), group, axis=1)
    value = codes.astype(np.float32) * scale
    if "m" not in found:
        return value
    minimum = spread(found["m"].view(np.float16))
    if "n" in found:
        minimum = minimum * spread(found["n"])
    return value + minimum if format in ("q4_1", "q5_1") else value - minimum


def _codes(plane: U8, width: int, k: int) -> npt.NDArray[np.int32]:
    """Codes of a plane: where each of the 32 elements of a line lies is looked up one by one."""
    rows, size = len(plane), 4 * width
    lines = plane.reshape(rows, k // 32, size)
    out = np.zeros((rows, k // 32, 32), np.int32)
    for element in range(32):
        quad, byte = divmod(element, 4)
        word, shift = {8: (quad, 0), 4: (quad % 4, 4 * (quad // 4)), 2: (quad % 2, 2 * (quad // 2)), 1: (0, quad)}[
            width
        ]
        out[:, :, element] = lines[:, :, 4 * word + byte] >> shift & (1 << width) - 1
    return out.reshape(rows, k)


def _read_fp8(format: str, data: U8, rows: int, k: int) -> F32:
    width = _up(k, 16)
    plane = data[: rows * width].reshape(rows, width)[:, :k]
    numbers = torch.from_numpy(np.ascontiguousarray(plane)).view(torch.float8_e4m3fn).float().numpy()
    rest = data[_up(rows * width, 256) :]
    if format == "fp8":
        return numbers * rest[:4].view("<f4")[0]
    tiles = -(-rows // 128), -(-k // 128)
    length = _up(4 * tiles[1], 16)
    scales = rest[: tiles[0] * length].reshape(tiles[0], length)[:, : 4 * tiles[1]]
    spread = np.ascontiguousarray(scales).view("<f4").repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :k]
    return numbers * spread


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
