"""The tile16 layout written out slowly in numpy from its description, as the witness of the kernels' own decoding."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
FLOATS = ("f32", "f16", "bf16")
QUANTIZED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
TILE = 16


@dataclass(frozen=True)
class Fields:
    """A GGUF matrix taken apart: codes [N, K]; d, dmin [N, K/super]; sub, submin [N, K/group] (or None)."""

    bits: int
    group: int
    super: int
    codes: U8
    d: npt.NDArray[np.float16]
    dmin: npt.NDArray[np.float16] | None = None
    sub: npt.NDArray[np.int8] | None = None
    submin: U8 | None = None


def gguf_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def block_size(name: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    return (1, 4 if name == "f32" else 2) if name in FLOATS else gguf.GGML_QUANT_SIZES[gguf_type(name)]


def dequantize(name: str, raw: U8) -> F32:
    """GGUF rows to float32 by gguf-py."""
    if name == "f32":
        return raw.view(np.float32)
    if name == "f16":
        return raw.view(np.float16).astype(np.float32)
    return gguf.dequantize(raw, gguf_type(name))


def random_rows(name: str, n: int, k: int, rng: np.random.Generator, codes: str = "random") -> U8:
    """Random GGUF rows [n, bytes]: every bit pattern in codes and sub-scales, scales of either sign near 0.01.

    ``codes`` is random, or zeros or ones for all bits but the float16 scales.
    """
    if name in FLOATS:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if name == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if name == "f16" else np.float32).view(np.uint8)
    size, width = block_size(name)
    blocks = rng.integers(0, 256, (n * k // size, width), dtype=np.uint8)
    if codes != "random":
        blocks[:] = 0 if codes == "zeros" else 255
    for at in _float16_fields(name):
        scale = rng.standard_normal(len(blocks)) * 0.01
        blocks[:, at : at + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(n, -1)


def _float16_fields(name: str) -> tuple[int, ...]:
    return {
        "q4_1": (0, 2),
        "q5_1": (0, 2),
        "q4_k": (0, 2),
        "q5_k": (0, 2),
        "q2_k": (80, 82),
        "q3_k": (108,),
        "q6_k": (208,),
    }.get(name, (0,))


def _f16(raw: U8, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16)


def _bits(raw: U8, width: int, run: int) -> U8:
    """Fields of ``width`` bits: in every run of ``run`` bytes, first the lowest field of each byte, then the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return ((raw.reshape(len(raw), -1, 1, run) >> shifts) & ((1 << width) - 1)).reshape(len(raw), -1)


def take_apart(name: str, raw: U8) -> Fields:
    """GGUF rows [N, bytes] to fields, following the block structures of ggml-common.h."""
    n, (size, width) = len(raw), block_size(name)
    parts = (_legacy if size == 32 else _k_quant)(name, raw.reshape(-1, width))
    bits, group = {"q2_k": (2, 16), "q3_k": (3, 16), "q6_k": (6, 16)}.get(name, (int(name[1]), 32))
    return Fields(
        bits, group, size, **{key: np.ascontiguousarray(value.reshape(n, -1)) for key, value in parts.items()}
    )


def _legacy(name: str, b: U8) -> dict[str, npt.NDArray]:
    parts: dict[str, npt.NDArray] = {"d": _f16(b, 0)}
    at = 2
    if name.endswith("_1"):
        parts["dmin"], at = _f16(b, 2), 4
    if name == "q8_0":
        return parts | {"codes": b[:, at:] + np.uint8(128)}
    high = np.zeros((len(b), 32), np.uint8)
    if name.startswith("q5"):
        high, at = np.unpackbits(b[:, at : at + 4], axis=1, bitorder="little"), at + 4
    return parts | {"codes": _bits(b[:, at:], 4, 16) | high << 4}


def _k_quant(name: str, b: U8) -> dict[str, npt.NDArray]:
    if name == "q2_k":
        return {
            "sub": (b[:, :16] & 15).astype(np.int8),
            "submin": b[:, :16] >> 4,
            "codes": _bits(b[:, 16:80], 2, 32),
            "d": _f16(b, 80),
            "dmin": _f16(b, 82),
        }
    if name == "q3_k":
        sub = _bits(b[:, 96:104], 4, 8) | _bits(b[:, 104:108], 2, 4) << 4
        return {
            "sub": sub.astype(np.int8) - np.int8(32),
            "codes": _bits(b[:, 32:96], 2, 32) | _bits(b[:, :32], 1, 32) << 2,
            "d": _f16(b, 108),
        }
    if name == "q6_k":
        return {
            "codes": _bits(b[:, :128], 4, 64) | _bits(b[:, 128:192], 2, 32) << 4,
            "sub": b[:, 192:208].view(np.int8),
            "d": _f16(b, 208),
        }
    s, m, both = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    sub = np.hstack([s & 63, both & 15 | s >> 2 & 48]).astype(np.int8)
    submin = np.hstack([m & 63, both >> 4 | m >> 2 & 48])
    codes = _bits(b[:, -128:], 4, 32)
    if name == "q5_k":
        codes = codes | _bits(b[:, 16:48], 1, 32) << 4
    return {"d": _f16(b, 0), "dmin": _f16(b, 2), "sub": sub, "submin": submin, "codes": codes}


def pack(name: str, raw: U8) -> U8:
    """GGUF rows [N, bytes] to the bytes of the tile16 layout, padded with zero rows to a whole tile."""
    raw = np.vstack([raw, np.zeros((-len(raw) % TILE, raw.shape[1]), np.uint8)])
    if name in FLOATS:
        values = raw.view(np.uint32 if name == "f32" else np.uint16)
        tiles = [values[n : n + TILE].T for n in range(0, len(values), TILE)]
        return np.frombuffer(b"".join(np.ascontiguousarray(t).tobytes() for t in tiles), np.uint8)
    f = take_apart(name, raw)
    out = bytearray()
    for n in range(0, len(raw), TILE):
        for block in range(f.codes.shape[1] // f.super):
            out += _record(f, n, block)
    return np.frombuffer(bytes(out), np.uint8)


def _record(f: Fields, n: int, block: int) -> bytes:
    rows = slice(n, n + TILE)
    out = f.d[rows, block].tobytes()
    if f.dmin is not None:
        out += f.dmin[rows, block].tobytes()
    per = f.super // f.group
    for g in range(block * per, block * per + per):
        out += b"" if f.sub is None else f.sub[rows, g].tobytes()
        out += b"" if f.submin is None else f.submin[rows, g].tobytes()
    for k in range(block * f.super, (block + 1) * f.super, 32):
        out += _planes(f.bits, f.codes[rows, k : k + 32])
    return out


def _planes(bits: int, codes: U8) -> bytes:
    """Codes [16, 32] as planes of 8, 4, 2 and 1 bits; line of step s: byte 4 * row + j is element 4 * s + j."""
    step = [codes[:, 4 * s : 4 * s + 4].reshape(64) for s in range(8)]
    if bits == 8:
        return b"".join(s.tobytes() for s in step)
    out = b""
    low = 0
    if bits >= 4:
        out += b"".join((step[p] & 15 | (step[p + 4] & 15) << 4).tobytes() for p in range(4))
        low = 4
    if bits - low >= 2:
        field = [s >> low & 3 for s in step]
        out += b"".join(
            (field[p] | field[p + 2] << 2 | field[p + 4] << 4 | field[p + 6] << 6).tobytes() for p in range(2)
        )
        low += 2
    if bits - low == 1:
        line = sum((s >> low & 1).astype(np.uint8) << i for i, s in enumerate(step))
        out += np.asarray(line, np.uint8).tobytes()
    return out


def quantize_x8(x: F32, cap: int) -> tuple[U8, npt.NDArray[np.float64]]:
    """Activations [T, K] to the bytes of an x8 buffer of ``cap`` rows, and the values they stand for as float64.

    The rows behind T hold junk. scale = max|x| / 127 over 32 elements, codes rounded to nearest even.
    """
    t, k = x.shape
    x = np.pad(x, ((0, 0), (0, -k % 32))).reshape(t, -1, 32)
    scale = (np.abs(x).max(-1) / np.float32(127)).astype(np.float32)
    codes = np.rint(x / np.where(scale > 0, scale, 1)[..., None]).clip(-127, 127).astype(np.int8)
    exact = (codes.astype(np.float64) * scale[..., None]).reshape(t, -1)[:, :k]
    return pack_x8(codes, scale, cap), exact


def pack_x8(codes: npt.NDArray[np.int8], scale: F32, cap: int) -> U8:
    """Codes [T, G, 32] and scales [T, G] to the bytes of an x8 buffer."""
    t, g, _ = codes.shape
    q = np.full((g, cap, 32), 77, np.int8)
    q[:, :t] = codes.transpose(1, 0, 2)
    s = np.full((g, cap), np.nan, np.float32)
    s[:, :t] = scale.T
    sums = q.reshape(g, cap, 2, 16).sum(-1, dtype=np.int32)
    return np.frombuffer(q.tobytes() + s.tobytes() + sums.tobytes(), np.uint8)
