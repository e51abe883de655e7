"""Attention on a GPU: the kernel instances for a layer's shape, their launch shapes, costs and partial results.

``attention_decode`` takes one row a sequence, normalises and rotates its query and key, writes key and value to their
page and attends, split over the live keys (src/attention.cu);
``attention_prefill`` takes a chunk of one sequence whose keys and values are in the pool already (triton_attention.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from tapeout.compiler.kernels.cuda.base import FLOAT_NAMES, Candidate, Define, GpuKernel, Param

if TYPE_CHECKING:
    from tapeout.compiler.devices import CudaDevice

Out = Literal["f32", "bf16", "f16"]


class Blocks(NamedTuple):
    """How the decode kernel spreads.

    Warps of a block; slots of a warp's ring, each the keys or the values of 16 tokens; how many such units each warp of
    a lone block may have before more blocks join in (near), and how many a warp has then (far); how many blocks may
    share one sequence's key head, and how many of these, a power of two, collect the results.
    """

    warps: int
    depth: int
    near: int = 1
    far: int = 1
    splits: int = 1
    collectors: int = 1


class PrefillTile(NamedTuple):
    """Query vectors of a tile, keys of a tile, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


PREFILL_TILES = (
    PrefillTile(128, 64, 8, 3),
    PrefillTile(128, 64, 8, 2),
    PrefillTile(128, 32, 8, 2),
    PrefillTile(64, 32, 4, 2),
    PrefillTile(64, 32, 8, 2),
    PrefillTile(32, 32, 4, 2),
)
"""Configurations, the best first; what exceeds a device is rejected when it is compiled."""
MAX_SPLITS = 128
MAX_COLLECTORS = 32
DEPTHS = range(2, 9)
_PART_BYTES = 32  # of four numbers of a result, with their maximum and sum


@dataclass(frozen=True)
class Attention:
    """One layer's attention. ``row`` is the width of a qkv row, ``*_col`` where its parts start, all in elements.

    ``window`` 0 is full attention, else key j is visible to query i iff i - window < j <= i. ``factor`` multiplies the
    cosines and sines; ``qk_norm`` normalises each head of q and k before the rotation, with ``eps``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    max_pages: int
    scale: float
    row: int
    q_col: int
    k_col: int
    v_col: int
    window: int = 0
    rope: bool = True
    factor: float = 1.0
    qk_norm: bool = False
    eps: float = 1e-6


def partial_bytes(shape: Attention, sequences: int, device: CudaDevice) -> int:
    """Memory for the blocks' parts of the results; zero before the first launch, and left zero by each."""
    splits = (blocks.splits for blocks in block_choices(shape, sequences, device))
    parts = shape.kv_heads * sequences * max((n for n in splits if n > 1), default=0)
    return parts * (shape.heads // shape.kv_heads) * shape.head_dim // 4 * _PART_BYTES


def decode(shape: Attention, sequences: int, device: CudaDevice, context: int, out: Out) -> list[Candidate]:
    """Kernels for one row of each of ``sequences``; costs are those of ``context`` live keys a sequence."""
    live = min(context, shape.window) if shape.window else context
    nbytes = sequences * live * shape.kv_heads * shape.head_dim * 4
    operations = 4 * sequences * live * shape.heads * shape.head_dim
    found: list[Candidate] = []
    for blocks in block_choices(shape, sequences, device):
        kernel = decode_kernel(shape, sequences, blocks, out, device.half_shared)
        grid = max(device.sm_count, blocks.splits * shape.kv_heads * sequences)
        found.append(Candidate(kernel, (grid, 1, 1), nbytes, operations, "bf16"))
    return found


def prefill(shape: Attention, rows: int, context: int, out: Out) -> list[Candidate]:
    """Kernels for ``rows`` rows of one sequence, the last of them seeing ``context`` keys."""
    live = min(context, shape.window + rows) if shape.window else context
    nbytes = live * shape.kv_heads * shape.head_dim * 4 + rows * shape.heads * shape.head_dim * 4
    seen = min(context - rows / 2, shape.window) if shape.window else context - rows / 2
    operations = int(4 * rows * seen * shape.heads * shape.head_dim)
    found: list[Candidate] = []
    for tile in PREFILL_TILES:
        kernel = prefill_kernel(shape, tile, out)
        blocks = -(-rows // (tile.rows // (shape.heads // shape.kv_heads)))
        found.append(Candidate(kernel, (shape.kv_heads, blocks, 1), nbytes, operations, "bf16"))
    return found


def decode_kernel(shape: Attention, rows: int, blocks: Blocks, out: Out, half_shared: int) -> GpuKernel:
    """One instance of attention.cu for up to ``rows`` rows.

    It takes ``half_shared`` bytes of shared memory, or more if it needs more: see gemv.py for why.
    """
    defines: dict[str, Define] = {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": shape.head_dim,
        "LDX": shape.row,
        "Q_COL": shape.q_col,
        "K_COL": shape.k_col,
        "V_COL": shape.v_col,
        "PAGE_TOKENS": shape.page_tokens,
        "MAX_PAGES": shape.max_pages,
        "ROPE": shape.rope,
        "FACTOR": float(shape.factor),
        "EPS": float(shape.eps),
        "QK_NORM": shape.qk_norm,
        "SCALE": float(shape.scale),
        "WINDOW": shape.window,
        "OUT": FLOAT_NAMES[out],
        "ROWS": rows,
        "SPLITS": blocks.splits,
        "COLLECTORS": blocks.collectors,
        "WARPS": blocks.warps,
        "DEPTH": blocks.depth,
        "NEAR": blocks.near,
        "FAR": blocks.far,
    }
    digest = hashlib.sha256(repr((sorted(defines.items()), out)).encode()).hexdigest()[:8]
    return GpuKernel(
        name=f"attention_decode_{_name(shape)}_{out}_r{rows}_x{blocks.splits}_w{blocks.warps}_d{blocks.depth}_{digest}",
        template="attention_decode",
        language="cuda",
        source="attention.cu",
        params=_decode_params(out),
        defines=tuple(defines.items()),
        threads=blocks.warps * 32,
        shared=max(half_shared, _shared_bytes(shape, blocks)),
    )


def prefill_kernel(shape: Attention, tile: PrefillTile, out: Out) -> GpuKernel:
    """One instance of attention_prefill."""
    params = (
        Param("q", dtype="f16"),
        *_STEP,
        Param("kv", dtype="f16"),
        Param("out", dtype=out),
        Param("counts", dtype="i32"),
    )
    defines: dict[str, Define] = {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "D": shape.head_dim,
        "T": shape.page_tokens,
        "MAX_PAGES": shape.max_pages,
        "SCALE": shape.scale,
        "WINDOW": shape.window,
        "INTERPRET": False,
        "BM": tile.rows,
        "BN": tile.keys,
    }
    digest = hashlib.sha256(repr((sorted(defines.items()), params)).encode()).hexdigest()[:8]
    name = f"attention_prefill_{_name(shape)}_{out}_m{tile.rows}_t{tile.keys}_w{tile.warps}_p{tile.stages}_{digest}"
    return GpuKernel(
        name=name,
        template="attention_prefill",
        language="triton",
        source="triton_attention:attention_prefill",
        params=params,
        defines=tuple(defines.items()),
        threads=tile.warps * 32,
        options=(("num_stages", tile.stages),),
    )


def examples() -> list[GpuKernel]:
    """Representative instances: grouped heads, every head size, window, norms, no rotation, each output type."""
    llama = _plain(32, 8, 128)
    gemma = _plain(4, 1, 256, window=512, qk_norm=True)
    odd = _plain(9, 3, 64, rope=False)
    return [
        decode_kernel(llama, 1, Blocks(6, 4, 2, 1, 16, 8), "f32", 0),
        decode_kernel(llama, 64, Blocks(6, 4, 2), "bf16", 0),
        decode_kernel(llama, 4, Blocks(5, 2, 1, 1, 4, 2), "f32", 0),
        decode_kernel(_plain(64, 8, 128, qk_norm=True), 1, Blocks(5, 4, 2, 1, 16, 8), "f32", 0),
        decode_kernel(_plain(16, 1, 128), 1, Blocks(4, 5, 2, 1, 128, 32), "f32", 0),
        decode_kernel(gemma, 1, Blocks(4, 2, 1, 1, 6, 4), "f32", 0),
        decode_kernel(odd, 1, Blocks(8, 6, 3, 1, 44, 16), "f16", 0),
        prefill_kernel(llama, PrefillTile(128, 32, 8, 2), "bf16"),
        prefill_kernel(gemma, PrefillTile(64, 32, 8, 2), "bf16"),
        prefill_kernel(odd, PrefillTile(64, 64, 4, 2), "f16"),
    ]


_STEP = (
    Param("positions", dtype="i32"),
    Param("row_segment", dtype="i32"),
    Param("page_table", dtype="i32"),
)


def _decode_params(out: Out) -> tuple[Param, ...]:
    return (
        Param("qkv", dtype="f32"),
        *_STEP,
        Param("inv_freq", dtype="f32"),
        Param("q_norm", dtype="f32"),
        Param("k_norm", dtype="f32"),
        Param("kv", dtype="f16"),
        Param("out", dtype=out),
        Param("partial"),
        Param("counts", dtype="i32"),
    )


def block_choices(shape: Attention, sequences: int, device: CudaDevice) -> list[Blocks]:
    """Ways to spread the decode kernel, the best first; where it spills, fewer warps have more registers.

    The best fills its half of the shared memory with rings that hold the most whole units (keys and values): those are
    there before the kernel waits. Among equals it has the most warps. A lone block serves what its rings hold, and more
    blocks join in for more keys than that.
    """
    found: list[Blocks] = []
    for most in (8, 4, 2):
        fitting = [
            Blocks(warps, depth, depth // 2)
            for warps in range(1, most + 1)
            for depth in DEPTHS
            if _shared_bytes(shape, Blocks(warps, depth)) <= device.half_shared
        ]
        best = max(fitting, key=lambda b: (b.warps * b.near, b.warps, b.depth), default=Blocks(most, 2))
        splits, collectors = _spread(shape, sequences, best.warps, device)
        found.append(best._replace(splits=splits, collectors=collectors))
    return list(dict.fromkeys(found))


def _spread(shape: Attention, sequences: int, warps: int, device: CudaDevice) -> tuple[int, int]:
    """How many blocks share a key head at most, and how many of them collect.

    Together they fill the device, but there are no more blocks than units of keys for their warps. A collector waits
    for the other blocks of its key head, so collectors take at most half of the multiprocessors: the others find room.
    """
    pairs = shape.kv_heads * sequences
    if pairs > device.sm_count // 2:
        return 1, 1
    keys = shape.max_pages * shape.page_tokens
    if shape.window:
        keys = min(keys, shape.window + 16)
    splits = max(1, min(device.sm_count // pairs, MAX_SPLITS, -(-keys // (16 * warps))))
    most = min(splits, device.sm_count // 2 // pairs, MAX_COLLECTORS)
    return splits, 1 << most.bit_length() - 1


def _shared_bytes(shape: Attention, blocks: Blocks) -> int:
    """Dynamic shared memory of attention.cu; the order is that of ``Shared`` in attention.cuh."""
    group, dim = shape.heads // shape.kv_heads, shape.head_dim
    slot = 16 * -(-dim // 64) * 128  # keys or values of 16 tokens, rows padded to whole 64 dimensions
    ring = max(blocks.depth * slot, group * (dim + 4) * 4)
    query = -(-group // 8) * 8 * (-(-dim // 32) * 32 + 8) * 2
    return blocks.warps * (ring + group * 8) + query + dim * (12 if shape.qk_norm else 4)


def _plain(
    heads: int, kv_heads: int, head_dim: int, window: int = 0, rope: bool = True, qk_norm: bool = False
) -> Attention:
    q, kv = heads * head_dim, kv_heads * head_dim
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=16,
        max_pages=512,
        scale=head_dim**-0.5,
        row=q + 2 * kv,
        q_col=0,
        k_col=q,
        v_col=q + kv,
        window=window,
        rope=rope,
        qk_norm=qk_norm,
    )


def _name(shape: Attention) -> str:
    window = f"_win{shape.window}" if shape.window else ""
    return f"{shape.heads}x{shape.kv_heads}x{shape.head_dim}{window}"
