"""The small CUDA kernels of a step: embedding, norms, rotation, elementwise kernels and sampling.

Each function fixes a kernel's shapes and returns it as a ``Candidate`` for ``rows`` rows: its grid, the bytes a launch
moves and its arithmetic. Sources are in ``src/``; strides and widths are in elements.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.kernels.cuda.attention import Attention
from tapeout.compiler.kernels.cuda.base import FLOAT_BYTES, FLOAT_NAMES, GATED, Candidate, Define, GpuKernel, Param
from tapeout.compiler.layouts import packed_bytes, plane_geometry, planes_hold
from tapeout.runtime.errors import TapeoutError

Defines = dict[str, Define]

TRITON_TYPE = {"f32": "fp32", "bf16": "bf16", "f16": "fp16"}

MAX_THREADS = 1024
FEW_ROWS = 16
"""Up to here a row's latency counts, so its elements are spread thin over threads; above, bytes in flight a thread."""
WARP = 32
SAMPLE_THREADS = 512
SAMPLE_BLOCKS = 8
"""Blocks of a cluster, which share a row of logits. The same for any number of rows, as sums depend on it."""
SAMPLE_SLICE = 4096
"""Tokens of a block, before another block joins in."""
SAMPLE_WORKSPACE = 33_792
"""Bytes of shared memory that a block takes beside logits."""
SMALLEST_SHARED = 101_376
"""Shared memory of a block that every device has."""
WIDE = 4
"""Elements of one 16-byte access."""


def embed(format: str, vocab: int, k: int, scale: float, rows: int) -> Candidate:
    """``y f32 [rows, k] = scale * w[tokens]``, ``w [vocab, k]`` raw floats or planes."""
    threads = _threads(k, WIDE, 1 if rows <= FEW_ROWS else 4)
    defines: Defines = {"K": k, "VOCAB": vocab, "SCALE": float(scale), "THREADS": threads}
    if FORMATS[format].is_float:
        defines |= {"RAW": FLOAT_NAMES[format]}
        row = FORMATS[format].row_bytes(k)
    else:
        defines |= plane_defines((vocab, k), format)
        row = packed_bytes((vocab, k), format, "planes") // vocab
    params = (_param("tokens", "i32"), _param("w", "u8"), _param("y", "fp32"), _param("counts", "i32"))
    kernel = _kernel("embed", "embed.cu", params, defines, threads, format)
    return _candidate(kernel, (rows, 1, 1), rows * (row + 4 * k), 2 * rows * k)


def plane_defines(shape: tuple[int, int], format: str) -> Defines:
    """What planes.cuh has to know of a quantized weight."""
    planes = plane_geometry(shape, format)
    scales = planes.scales
    defines: Defines = {
        "RAW": 0,
        "BITS": planes.bits,
        "E4M3": planes.element == "e4m3",
        "GROUP": planes.group,
        "SUPER": planes.super,
        "ZERO": planes.zero,
        "SIGN": planes.minimum_sign,
        "D_BF16": planes.d_type == "bf16",
        "SCALES_AT": _offset(scales.offset),
        "SCALES_ROW": scales.row_bytes,
        "SCALES_TILE": scales.tile_rows,
    }
    for i, plane in enumerate(planes.codes):
        defines |= {f"PLANE{i}_AT": _offset(plane.offset), f"PLANE{i}_ROW": plane.row_bytes}
    for name in ("d", "dmin", "sub", "submin", "zeros"):
        place: int | None = getattr(scales, name)
        defines[f"{name.upper()}_AT"] = -1 if place is None else place
    return defines


def rmsnorm(k: int, ldx: int, eps: float, out: str, rows: int, count_index: int = 0) -> Candidate:
    """``y out [rows, k] = x / rms(x) * weight`` of ``x f32 [rows, ldx]``; ``count_index``: which count is the rows."""
    params = (_param("x"), _param("weight"), _param("y", TRITON_TYPE[out]), _param("counts", "i32"))
    return _norm("rmsnorm", params, _norm_defines(k, ldx, eps, out, count_index), rows)


def rmsnorm_add(k: int, ldx: int, eps: float, rows: int) -> Candidate:
    """``y f32 [rows, k] += x / rms(x) * weight``."""
    params = (_param("x"), _param("weight"), _param("y"), _param("counts", "i32"))
    return _norm("rmsnorm_add", params, {**_norm_defines(k, ldx, eps, "f32", 0), "ADD": 1}, rows)


def _norm_defines(k: int, ldx: int, eps: float, out: str, count_index: int) -> Defines:
    return {"K": k, "LDX": ldx, "EPS": float(eps), "OUT": FLOAT_NAMES[out], "COUNT": count_index, "ADD": 0}


def _norm(name: str, params: tuple[Param, ...], defines: Defines, rows: int) -> Candidate:
    k, ldx = int(defines["K"]), int(defines["LDX"])
    threads = _threads(k, _width(k, ldx), 1 if rows <= FEW_ROWS else 4)
    kernel = _kernel(name, "norm.cu", params, {**defines, "THREADS": threads}, threads)
    kind = next(key for key, value in FLOAT_NAMES.items() if value == defines["OUT"])
    moved = 4 + FLOAT_BYTES[kind] + 4 * bool(defines["ADD"])
    return _candidate(kernel, (rows, 1, 1), rows * k * moved, 4 * rows * k)


def rope_kv(shape: Attention, rows: int) -> Candidate:
    """Queries and keys normed and rotated, keys and values written to their pages; one block a row.

    Raises TapeoutError for a head size that is no multiple of 4.
    """
    d = shape.head_dim
    if d % WIDE:
        raise TapeoutError(f"a head of {d} elements cannot be rotated on a GPU; its size must be a multiple of {WIDE}")
    heads = shape.heads + 2 * shape.kv_heads
    threads = WARP * min(8, heads)
    defines: Defines = {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": d,
        "LDX": shape.row,
        "Q_COL": shape.q_col,
        "K_COL": shape.k_col,
        "V_COL": shape.v_col,
        "PAGE_TOKENS": shape.page_tokens,
        "MAX_PAGES": shape.max_pages,
        "FACTOR": float(shape.factor),
        "EPS": float(shape.eps),
        "QK_NORM": shape.qk_norm,
        "ROPE": shape.rope,
        "THREADS": threads,
    }
    integers = (_param(name, "i32") for name in ("positions", "row_segment", "page_table"))
    floats = (_param(name) for name in ("inv_freq", "q_norm", "k_norm"))
    halves = (_param(name, "fp16") for name in ("kv", "q_out"))
    params = (_param("qkv"), *integers, *floats, *halves, _param("counts", "i32"))
    kernel = _kernel("rope_kv", "rope.cu", params, defines, threads)
    return _candidate(kernel, (rows, 1, 1), rows * heads * d * 6, 6 * rows * heads * d)


def gather(k: int, rows: int) -> Candidate:
    """``y f32 [rows, k] = x[out_row]``; the rows are those of the step that are wanted."""
    params = (_param("x"), _param("out_row", "i32"), _param("y"), _param("counts", "i32"))
    return _elementwise("gather", params, {"OP": 1, "K": k, "LDX": k, "OUT": FLOAT_NAMES["f32"], "COUNT": 2}, rows, 8)


def gated(act: str, k: int, ldx: int, out: str, rows: int) -> Candidate:
    """``y out [rows, k] = act(x[:, :k]) * x[:, k:2k]`` of ``x f32 [rows, ldx]``; ``act``: silu or gelu_tanh."""
    params = (_param("x"), _param("y", TRITON_TYPE[out]), _param("counts", "i32"))
    defines: Defines = {"OP": 2, "K": k, "LDX": ldx, "OUT": FLOAT_NAMES[out], "ACT": GATED[act], "COUNT": 0}
    return _elementwise("gated", params, defines, rows, 8 + FLOAT_BYTES[out])


def add(k: int, rows: int) -> Candidate:
    """``y f32 [rows, k] += x``."""
    params = (_param("x"), _param("y"), _param("counts", "i32"))
    return _elementwise("add", params, {"OP": 3, "K": k, "LDX": k, "OUT": FLOAT_NAMES["f32"], "COUNT": 0}, rows, 12)


def cast(k: int, ldx: int, out: str, rows: int) -> Candidate:
    """``y out [rows, k] = x[:, :k]`` of ``x f32 [rows, ldx]``."""
    params = (_param("x"), _param("y", TRITON_TYPE[out]), _param("counts", "i32"))
    defines: Defines = {"OP": 4, "K": k, "LDX": ldx, "OUT": FLOAT_NAMES[out], "COUNT": 0}
    return _elementwise("cast", params, defines, rows, 4 + FLOAT_BYTES[out])


def _elementwise(name: str, params: tuple[Param, ...], defines: Defines, rows: int, moved: int) -> Candidate:
    """``moved``: bytes an element costs."""
    k, ldx = int(defines["K"]), int(defines["LDX"])
    vector, items = _width(k, ldx), 1 if rows <= FEW_ROWS else 2
    threads = min(256, _threads(k, vector, items))
    kernel = _kernel(name, "elementwise.cu", params, {**defines, "THREADS": threads, "ITEMS": items}, threads)
    chunks = -(-k // (threads * items * vector))
    return _candidate(kernel, (rows, chunks, 1), rows * k * moved, rows * k)


def sample(vocab: int, rows: int, advance: bool, shared: int = SMALLEST_SHARED) -> Candidate:
    """A token and its log probability for every row of ``logits f32 [rows, vocab]``; -1 for a row that holds a NaN or
    has no finite maximum. ``advance`` makes tokens, positions and sample_position those of the next step.

    ``shared``: bytes of shared memory that a block may take. Logits that do not fit are read from device memory again.
    """
    blocks = next((count for count in (1, 2, 4) if vocab <= count * SAMPLE_SLICE), SAMPLE_BLOCKS)
    piece = -(-vocab // blocks)
    held = min(-(-piece // WIDE) * WIDE, (shared - SAMPLE_WORKSPACE) // 16 * WIDE)
    defines: Defines = {
        "VOCAB": vocab,
        "CLUSTER": blocks,
        "THREADS": SAMPLE_THREADS,
        "HELD": held,
        "WORKSPACE": SAMPLE_WORKSPACE,
        "ADVANCE": advance,
        "MASS_BITS": 63 - vocab.bit_length(),
    }
    params = (
        *(_param("logits"), _param("temperature"), _param("top_p"), _param("top_k", "i32")),
        *(_param("seed", "u64"), _param("sample_position", "u64"), _param("counts", "i32")),
        *(_param("sampled", "i32"), _param("logprob"), _param("tokens", "i32"), _param("positions", "i32")),
    )
    kernel = _kernel("sample", "sample.cu", params, defines, SAMPLE_THREADS, shared=SAMPLE_WORKSPACE + 4 * held)
    return _candidate(kernel, (blocks, rows, 1), 4 * rows * vocab, 30 * rows * vocab)


def examples() -> list[GpuKernel]:
    """An instance of every kernel, for tests of the toolchain."""
    llama = Attention(32, 8, 128, 16, 512, 0.088, 6144, 0, 4096, 5120)
    gemma = Attention(4, 1, 256, 16, 512, 0.0625, 1536, 0, 1024, 1280, qk_norm=True)
    made = [
        *(embed(name, 1000, 512, 1.0, 1) for name in FORMATS if FORMATS[name].is_float or planes_hold(name)),
        *(rmsnorm(4096, 4096, 1e-5, out, 2048) for out in FLOAT_NAMES),
        *(rmsnorm(640, 640, 1e-6, "f32", 1, count_index=2), rmsnorm_add(1152, 1152, 1e-6, 1)),
        *(rope_kv(llama, 2048), rope_kv(gemma, 64), gather(4096, 8), add(2048, 1), cast(4096, 6144, "bf16", 64)),
        *(gated("silu", 14336, 28672, "bf16", 2048), gated("gelu_tanh", 2048, 4096, "f32", 1)),
        *(sample(128256, 1, True), sample(262144, 128, False), sample(49152, 4, True)),
    ]
    return [candidate.kernel for candidate in made]


def _offset(value: int) -> str:
    """A byte offset as a 64-bit literal."""
    return f"{value}ll"


def _param(name: str, dtype: Literal["fp32", "fp16", "bf16", "i32", "u64", "u8"] | str = "fp32") -> Param:
    return Param(name, "ptr", dtype)


def _width(k: int, ldx: int) -> int:
    """Elements an access takes: rows that do not start on 16 bytes are read one by one."""
    return WIDE if k % WIDE == 0 and ldx % WIDE == 0 else 1


def _threads(k: int, vector: int, items: int) -> int:
    """Threads for a row of k elements, ``items`` accesses each; more accesses where threads end."""
    wanted = -(-k // (vector * items))
    return min(MAX_THREADS, -(-wanted // WARP) * WARP)


def _kernel(
    template: str,
    source: str,
    params: tuple[Param, ...],
    defines: Defines,
    threads: int,
    of: str = "",
    shared: int = 0,
) -> GpuKernel:
    ordered = tuple(sorted(defines.items()))
    digest = hashlib.sha256(repr((source, ordered)).encode()).hexdigest()[:10]
    name = "_".join(part for part in (template, of, digest) if part)
    return GpuKernel(name, template, "cuda", source, params, ordered, threads, shared)


def _candidate(kernel: GpuKernel, grid: tuple[int, int, int], nbytes: int, operations: int) -> Candidate:
    return Candidate(kernel, grid, nbytes, operations, "f32")
