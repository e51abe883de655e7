"""Attention on a GPU: the kernel instances for a layer's shape, their launch shapes, costs and scratch memory.

``attention_decode`` takes one row a sequence, normalises and rotates its query and key, writes key and value to their
page and attends, split over the live keys (triton_attention.py, or src/attention.cu);
``attention_prefill`` takes a chunk of one sequence whose keys and values are in the pool already (triton_attention.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tapeout.compiler.kernels.cuda.base import FLOAT_NAMES, Candidate, Define, GpuKernel, Param

Out = Literal["f32", "bf16", "f16"]


class DecodeTile(NamedTuple):
    """Keys of a tile, warps, pipeline stages, and up to how many tiles one block takes without sharing them."""

    keys: int
    warps: int = 4
    stages: int = 3
    alone: int = 1


class Blocks(NamedTuple):
    """How the CUDA decode kernel spreads: warps of a block, blocks of a cluster, tiles of 16 keys that a warp loads at
    once, how many such loads a warp takes before more blocks (near) and more clusters (far) join in, and how many
    blocks find registers on one multiprocessor."""

    warps: int = 8
    cluster: int = 8
    tiles: int = 1
    near: int = 1
    far: int = 4
    resident: int = 2


class PrefillTile(NamedTuple):
    """Query vectors of a tile, keys of a tile, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


DECODE_TILES = (
    DecodeTile(128, stages=2, alone=2),
    DecodeTile(64, stages=4, alone=4),
    DecodeTile(64, stages=2, alone=4),
    DecodeTile(32, stages=2, alone=4),
)
PREFILL_TILES = (
    PrefillTile(128, 64, 8, 3),
    PrefillTile(128, 64, 8, 2),
    PrefillTile(128, 32, 8, 2),
    PrefillTile(64, 32, 4, 2),
    PrefillTile(64, 32, 8, 2),
    PrefillTile(32, 32, 4, 2),
)
"""Configurations, the best first; what exceeds a device is rejected when it is compiled."""
MAX_SPLITS = 64
SHARED_BYTES = 50 * 1024
"""What a decode block may take, so that the next kernel finds room beside it and starts to load its weights."""
BLOCKS_PER_SM = 1
MAX_CLUSTER = 8
_PART_PADDING = 32  # floats behind a split's output: 16 maxima and 16 sums


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


def splits(shape: Attention, sequences: int, sm_count: int, tile: int = DECODE_TILES[0].keys) -> int:
    """How many blocks may share one sequence's key head: enough to fill the device, no more than there are tiles."""
    pairs = shape.kv_heads * sequences
    wanted = BLOCKS_PER_SM * sm_count // pairs
    keys = shape.max_pages * shape.page_tokens
    if shape.window:
        keys = min(keys, shape.window + tile)
    return max(1, min(wanted, MAX_SPLITS, -(-keys // tile)))


def partial_bytes(shape: Attention, sequences: int, sm_count: int) -> int:
    """Scratch for the splits' results: enough for every candidate of ``decode``."""
    group = shape.heads // shape.kv_heads
    most = max(splits(shape, sequences, sm_count, tile.keys) for tile in DECODE_TILES)
    most = max(most, *(spread for _, spread in _spreads(shape, sequences, sm_count)))
    return sequences * shape.kv_heads * most * (group * shape.head_dim + _PART_PADDING) * 4


def counter_bytes(shape: Attention, sequences: int) -> int:
    """Counters of arrived blocks, i32; zero before the first launch, and left zero by each."""
    return sequences * shape.kv_heads * MAX_CLUSTER * 4


def decode(shape: Attention, sequences: int, sm_count: int, context: int, out: Out) -> list[Candidate]:
    """Kernels for one row of each of ``sequences``; costs are those of ``context`` live keys a sequence.

    The Triton kernels come first: the CUDA kernel gave the right numbers on an H200 and was not timed beside them.
    """
    live = min(context, shape.window) if shape.window else context
    nbytes = sequences * live * shape.kv_heads * shape.head_dim * 4
    operations = 4 * sequences * live * shape.heads * shape.head_dim
    found: list[Candidate] = []
    for tile in DECODE_TILES:
        count = splits(shape, sequences, sm_count, tile.keys)
        kernel = decode_kernel(shape, count, tile, out)
        found.append(Candidate(kernel, (count, shape.kv_heads, sequences), nbytes, operations, "bf16"))
    for blocks, count in _spreads(shape, sequences, sm_count):
        kernel = cuda_decode_kernel(shape, count, blocks, out)
        found.append(Candidate(kernel, (count, shape.kv_heads, sequences), nbytes, operations, "bf16"))
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


def cuda_decode_kernel(shape: Attention, count: int, blocks: Blocks, out: Out) -> GpuKernel:
    """One instance of attention.cu for a grid of ``count`` blocks a key head, a multiple of the cluster."""
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
        "SPLITS": count,
        "CLUSTER": blocks.cluster,
        "WARPS": blocks.warps,
        "TILES": blocks.tiles,
        "NEAR": blocks.near,
        "FAR": blocks.far,
        "MIN_BLOCKS": blocks.resident,
    }
    digest = hashlib.sha256(repr((sorted(defines.items()), out)).encode()).hexdigest()[:8]
    return GpuKernel(
        name=f"attention_decode_{_name(shape)}_{out}_x{count}_c{blocks.cluster}_w{blocks.warps}_{digest}",
        template="attention_decode",
        language="cuda",
        source="attention.cu",
        params=_decode_params(out),
        defines=tuple(defines.items()),
        threads=blocks.warps * 32,
        shared=_shared_bytes(shape, blocks.warps),
    )


def decode_kernel(shape: Attention, count: int, tile: DecodeTile, out: Out) -> GpuKernel:
    """One instance of attention_decode with ``count`` splits."""
    defines: dict[str, Define] = {
        **_common(shape),
        "LD": shape.row,
        "Q_COL": shape.q_col,
        "K_COL": shape.k_col,
        "V_COL": shape.v_col,
        "ROPE": shape.rope,
        "FACTOR": shape.factor,
        "EPS": shape.eps,
        "QK_NORM": shape.qk_norm,
        "SPLITS": count,
        "ALONE": tile.alone,
        "BN": tile.keys,
    }
    name = f"attention_decode_{_name(shape)}_{out}_x{count}_t{tile.keys}_w{tile.warps}_p{tile.stages}"
    return _kernel(name, "attention_decode", _decode_params(out), defines, tile.warps, tile.stages)


def prefill_kernel(shape: Attention, tile: PrefillTile, out: Out) -> GpuKernel:
    """One instance of attention_prefill."""
    params = (
        Param("q", dtype="f16"),
        *_STEP,
        Param("kv", dtype="f16"),
        Param("out", dtype=out),
        Param("counts", dtype="i32"),
    )
    defines: dict[str, Define] = {**_common(shape), "BM": tile.rows, "BN": tile.keys}
    name = f"attention_prefill_{_name(shape)}_{out}_m{tile.rows}_t{tile.keys}_w{tile.warps}_p{tile.stages}"
    return _kernel(name, "attention_prefill", params, defines, tile.warps, tile.stages)


def examples() -> list[GpuKernel]:
    """Representative instances: grouped heads, every head size, window, norms, no rotation, each output type."""
    llama = _plain(32, 8, 128)
    gemma = _plain(4, 1, 256, window=512, qk_norm=True)
    odd = _plain(9, 3, 64, rope=False)
    return [
        cuda_decode_kernel(llama, 16, Blocks(resident=1), "f32"),
        cuda_decode_kernel(llama, 1, Blocks(cluster=1), "bf16"),
        cuda_decode_kernel(_plain(64, 8, 128), 16, Blocks(resident=1), "f32"),
        cuda_decode_kernel(_plain(16, 1, 128), 64, Blocks(warps=4, resident=1), "f32"),
        cuda_decode_kernel(gemma, 4, Blocks(cluster=4, resident=1), "f32"),
        cuda_decode_kernel(odd, 40, Blocks(tiles=2, resident=1), "f16"),
        decode_kernel(llama, 33, DecodeTile(64), "f32"),
        decode_kernel(gemma, 9, DecodeTile(32, stages=2), "f32"),
        decode_kernel(odd, 1, DecodeTile(32, stages=2), "bf16"),
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
        Param("partial", dtype="f32"),
        Param("counters", dtype="i32"),
        Param("counts", dtype="i32"),
    )


def _shared_bytes(shape: Attention, warps: int) -> int:
    """Dynamic shared memory of attention.cu; the order is that of ``Shared`` in attention.cuh."""
    group, dim = shape.heads // shape.kv_heads, shape.head_dim
    pieces = -(-dim // 32)
    query = -(-group // 8) * 8 * (pieces * 32 + (0 if pieces % 2 else 32)) * 2
    current = dim * 6 + 64
    sums = warps * group * ((dim + 4) * 4 + 8)
    exchanged = (group * dim // 4 + MAX_CLUSTER) * 16 + MAX_CLUSTER * group * 8
    return query + current + sums + exchanged


def _spreads(shape: Attention, sequences: int, sm_count: int) -> list[tuple[Blocks, int]]:
    """Ways to spread the CUDA kernel, the best first, each with its blocks a key head."""
    group = shape.heads // shape.kv_heads
    warps = next((w for w in (8, 4, 2) if _shared_bytes(shape, w) <= SHARED_BYTES), 1)
    wanted = sm_count // (shape.kv_heads * sequences)
    keys = shape.max_pages * shape.page_tokens
    if shape.window:
        keys = min(keys, shape.window + 16)
    wanted = max(1, min(wanted, MAX_SPLITS, -(-keys // (16 * warps))))
    cluster = next(size for size in (8, 4, 2, 1) if size <= wanted)
    best = 16 // warps if shape.head_dim <= 128 and group <= 8 else 1
    return [(Blocks(warps, cluster, resident=n), wanted // cluster * cluster) for n in dict.fromkeys((best, 1))]


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


def _common(shape: Attention) -> dict[str, Define]:
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "D": shape.head_dim,
        "T": shape.page_tokens,
        "MAX_PAGES": shape.max_pages,
        "SCALE": shape.scale,
        "WINDOW": shape.window,
        "INTERPRET": False,
    }


def _name(shape: Attention) -> str:
    window = f"_win{shape.window}" if shape.window else ""
    return f"{shape.heads}x{shape.kv_heads}x{shape.head_dim}{window}"


def _kernel(
    name: str, template: str, params: tuple[Param, ...], defines: dict[str, Define], warps: int, stages: int
) -> GpuKernel:
    digest = hashlib.sha256(repr((sorted(defines.items()), params)).encode()).hexdigest()[:8]
    return GpuKernel(
        name=f"{name}_{digest}",
        template=template,
        language="triton",
        source=f"triton_attention:{template}",
        params=params,
        defines=tuple(defines.items()),
        threads=warps * 32,
        options=(("num_stages", stages),),
    )
