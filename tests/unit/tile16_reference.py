"""The tile16 layout written out slowly in numpy from its description, as the witness of the kernels' own decoding."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
import torch

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
FLOATS = ("f32", "f16", "bf16")
LEGACY = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4")
GGUF = (*LEGACY, "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
# elements a block, whether a group has a zero of its own
INT4 = {
    "int4_g32": (32, False),
    "int4_g64": (64, False),
    "int4_g128": (128, False),
    "int4_g32_zp": (32, True),
    "int4_g64_zp": (64, True),
    "int4_g128_zp": (128, True),
    "int4_g32_zp_f16": (32, True),
    "int4_g128_zp_f16": (128, True),
}
INT8 = {"int8_g32": 32, "int8_g128": 128}
E4M3 = {"fp8": (0, 0), "fp8_row": (1, 0), "fp8_block128": (128, 128)}  # rows and columns under a scale, 0 for all
QUANTIZED = (*GGUF, *INT4, *INT8, "nvfp4")
OURS = (*INT4, *INT8, "nvfp4", *E4M3)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
TILE = 16


@dataclass(frozen=True)
class Fields:
    """A matrix taken apart, as the bytes that lie in the layout: codes [N, K]; d, dmin [N, K/super]; sub, submin and
    zeros [N, K/group]; head [N], a scale of the whole row (or None)."""

    bits: int
    group: int
    super: int
    codes: U8
    d: npt.NDArray | None = None
    dmin: npt.NDArray[np.float16] | None = None
    sub: npt.NDArray[np.int8] | None = None
    submin: U8 | None = None
    zeros: U8 | None = None
    head: F32 | None = None


def gguf_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def block_size(name: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    if name in INT4:
        group, own = INT4[name]
        return group, 2 + own + group // 2
    if name in INT8:
        return INT8[name], 2 + INT8[name]
    if name in OURS:
        return 32, 22 if name == "nvfp4" else 36
    return (1, 4 if name == "f32" else 2) if name in FLOATS else gguf.GGML_QUANT_SIZES[gguf_type(name)]


def dequantize(name: str, raw: U8) -> F32:
    """Rows to float32: those of GGUF by gguf-py, ours as they are defined (compiler/formats)."""
    if name in OURS:
        return _our_values(name, raw)
    if name == "f32":
        return raw.view(np.float32)
    if name == "f16":
        return raw.view(np.float16).astype(np.float32)
    return gguf.dequantize(raw, gguf_type(name))


def _our_values(name: str, raw: U8) -> F32:
    if name in E4M3:
        blocks = raw.reshape(len(raw), -1, 36)
        numbers = e4m3(blocks[..., 4:]) * np.ascontiguousarray(blocks[..., :4]).view("<f4")
        return numbers.reshape(len(raw), -1)
    f = take_apart(name, raw)
    if f.head is not None and f.sub is not None:
        scale = e4m3(f.sub.view(np.uint8)) * f.head[:, None]
        return scale.repeat(16, axis=1) * E2M1[f.codes]
    assert f.d is not None
    d = f.d.astype(np.float32) if f.d.dtype == np.float16 else (f.d.astype(np.uint32) << 16).view(np.float32)
    zeros = 1 << f.bits - 1 if f.zeros is None else f.zeros.astype(np.float32).repeat(f.group, axis=1)
    return d.repeat(f.super, axis=1) * (f.codes - np.float32(zeros))


def e4m3(codes: U8) -> F32:
    """e4m3fn numbers by torch."""
    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn).float().numpy()


def random_rows(name: str, n: int, k: int, rng: np.random.Generator, codes: str = "random") -> U8:
    """Random rows [n, bytes]: every bit pattern in codes and sub-scales, scales of either sign near 0.01.

    ``codes`` is random, or zeros or ones for all bits but the scales, or sevens for all halves of a byte.
    """
    if name in FLOATS:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if name == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if name == "f16" else np.float32).view(np.uint8)
    size, width = block_size(name)
    blocks = rng.integers(0, 256, (n * k // size, width), dtype=np.uint8)
    if codes != "random":
        blocks[:] = {"zeros": 0, "ones": 255, "sevens": 0x77}[codes]
    if name in OURS:
        return _our_scales(name, blocks.reshape(n, -1, width), rng).reshape(n, -1)
    if name == "mxfp4":
        blocks[:, 0] = rng.integers(118, 126, len(blocks))
        blocks[0, 0], blocks[-1, 0] = 1, 0  # halves of these are subnormal
        return blocks.reshape(n, -1)
    for at in _float16_fields(name):
        scale = rng.standard_normal(len(blocks)) * 0.01
        blocks[:, at : at + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(n, -1)


def _our_scales(name: str, blocks: U8, rng: np.random.Generator) -> U8:
    """Blocks [n, K/block, bytes] under scales that the format allows, and without NaN."""
    n, count, _ = blocks.shape
    if name in INT4 or name in INT8:
        d = (rng.standard_normal((n, count)) * 0.01).astype(np.float32)
        half = d.astype(np.float16).view("<u2")
        bits = half if name.endswith("_f16") else (d.view(np.uint32) >> 16).astype("<u2")
        blocks[..., :2] = bits[..., None].view(np.uint8)
        if "_zp" in name:
            blocks[..., 2] = rng.integers(0, 16, (n, count))
        return blocks
    rows, columns = {**E4M3, "nvfp4": (1, 0)}[name]
    rows, columns = rows or n, columns // 32 or count
    scale = (rng.standard_normal((-(-n // rows), -(-count // columns))) * 1e-4).astype("<f4")
    scale = scale.repeat(rows, axis=0)[:n].repeat(columns, axis=1)[:, :count]
    blocks[..., :4] = scale[..., None].view(np.uint8)
    numbers = blocks[..., 4 : 6 if name == "nvfp4" else None]
    numbers[numbers & 127 == 127] -= 1
    return blocks


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
    """Rows [N, bytes] to fields; those of GGUF following the block structures of ggml-common.h."""
    n, (size, width) = len(raw), block_size(name)
    take = _ours if name in OURS else _legacy if name in LEGACY else _k_quant
    parts = take(name, raw.reshape(-1, width))
    if name == "nvfp4":
        codes, sub = parts["codes"].reshape(n, -1), parts["sub"].reshape(n, -1)
        return Fields(4, 16, 32, codes, sub=sub, head=parts["head"].reshape(n, -1)[:, 0])
    bits = {"mxfp4": 4, "iq4_nl": 4, "iq4_xs": 4}.get(name) or int(name[3] if name in OURS else name[1])
    group = 16 if name in ("q2_k", "q3_k", "q6_k") else size if name in OURS else 32
    return Fields(
        bits, group, size, **{key: np.ascontiguousarray(value.reshape(n, -1)) for key, value in parts.items()}
    )


def _ours(name: str, b: U8) -> dict[str, npt.NDArray]:
    if name == "nvfp4":
        head = np.ascontiguousarray(b[:, :4]).view("<f4")
        return {"head": head, "sub": np.ascontiguousarray(b[:, 4:6]), "codes": _bits(b[:, 6:], 4, 16)}
    if name in INT8:
        return {"d": np.ascontiguousarray(b[:, :2]).view("<u2"), "codes": b[:, 2:] ^ np.uint8(128)}
    d, (_, own) = np.ascontiguousarray(b[:, :2]), INT4[name]
    parts = {"d": d.view(np.float16 if name.endswith("_f16") else "<u2"), "codes": _bits(b[:, 2 + own :], 4, 16)}
    return parts | {"zeros": b[:, 2:3]} if own else parts


def _legacy(name: str, b: U8) -> dict[str, npt.NDArray]:
    if name == "mxfp4":
        return {"d": b[:, :1], "codes": _bits(b[:, 1:], 4, 16)}
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
    if name == "iq4_xs":
        high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
        low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
        return {
            "d": _f16(b, 0),
            "sub": (low | high << 4).astype(np.int8) - np.int8(32),
            "codes": _bits(b[:, 8:], 4, 16),
        }
    s, m, both = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    sub = np.hstack([s & 63, both & 15 | s >> 2 & 48]).astype(np.int8)
    submin = np.hstack([m & 63, both >> 4 | m >> 2 & 48])
    codes = _bits(b[:, -128:], 4, 32)
    if name == "q5_k":
        codes = codes | _bits(b[:, 16:48], 1, 32) << 4
    return {"d": _f16(b, 0), "dmin": _f16(b, 2), "sub": sub, "submin": submin, "codes": codes}


def pack(name: str, raw: U8) -> U8:
    """Rows [N, bytes] to the bytes of the tile16 layout, padded with zero rows to a whole tile."""
    raw = np.vstack([raw, np.zeros((-len(raw) % TILE, raw.shape[1]), np.uint8)])
    if name in FLOATS:
        values = raw.view(np.uint32 if name == "f32" else np.uint16)
        tiles = [values[n : n + TILE].T for n in range(0, len(values), TILE)]
        return np.frombuffer(b"".join(np.ascontiguousarray(t).tobytes() for t in tiles), np.uint8)
    if name in E4M3:
        return _pack_e4m3(raw)
    f = take_apart(name, raw)
    out = bytearray()
    for n in range(0, len(raw), TILE):
        if f.head is not None:
            out += (f.head[n : n + TILE] / 2).tobytes()  # the kernels' E2M1 numbers are doubled
        for block in range(f.codes.shape[1] // f.super):
            out += _record(f, n, block)
    return np.frombuffer(bytes(out), np.uint8)


def _pack_e4m3(raw: U8) -> U8:
    """For each 128 elements of a tile the scales of its rows, then the numbers of the rows element by element."""
    blocks = raw.reshape(len(raw), -1, 36)
    out = bytearray()
    for n in range(0, len(raw), TILE):
        for block in range(0, blocks.shape[1], 4):
            record = blocks[n : n + TILE, block : block + 4]
            out += record[:, 0, :4].tobytes() + record[..., 4:].reshape(TILE, -1).T.tobytes()
    return np.frombuffer(bytes(out), np.uint8)


def _record(f: Fields, n: int, block: int) -> bytes:
    rows = slice(n, n + TILE)
    out = b"" if f.d is None else f.d[rows, block].tobytes()
    if f.dmin is not None:
        out += f.dmin[rows, block].tobytes()
    per = f.super // f.group
    for g in range(block * per, block * per + per):
        out += b"" if f.sub is None else f.sub[rows, g].tobytes()
        out += b"" if f.submin is None else f.submin[rows, g].tobytes()
        out += b"" if f.zeros is None else f.zeros[rows, g].tobytes()
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
