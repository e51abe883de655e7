"""Kernels of latent attention: partial rotation, the cache of [latent | rope] keys, and the index that selects keys."""

from __future__ import annotations

from tapeout.compiler.stages import KernelEntry

MAX_KEY = 576
"""Latent and rope channels of one key, at most (MAX_KEY of latent.c)."""
MAX_LATENT = 512
MAX_INDEX_HEADS, MAX_INDEX_QUERIES, MAX_TOP_K = 128, 16384, 4096
"""Heads, floats of all heads, and selected keys, at most (index.c)."""
_SPLITS = 16  # TP_INDEX_SPLITS of index.h


def _entry(name: str, source: str, params: str, dtype: str = "") -> KernelEntry:
    """A kernel; those over a cache are compiled once a ``dtype`` of it."""
    defines = (("TP_KV_F16", "1" if dtype == "f16" else "0"),) if dtype else ()
    full = f"{name}_{dtype}" if dtype else name
    return KernelEntry(full, source.removesuffix(".c"), tuple(params.split()), source, defines)


ROTATE = _entry("rotate", "rotate.c", "x ldx table heads period rotated pairs sign")
LAYERNORM = _entry("layernorm", "rotate.c", "x ldx weight bias y k eps")
GATHER_COLUMNS = _entry("gather_columns", "rotate.c", "x ldx y heads period width")

_INDEX = "q ldq y kv heads head_dim weights ldw page_tokens top_k scale parts parts_bytes"
INDEX_MERGE = _entry("index_merge", "index_merge.c", _INDEX)
"""Follows each index_select that has room for parts, with the same arguments."""


def latent_kv(dtype: str) -> KernelEntry:
    """Writes the keys [latent | rope] of a step to the pool in ``dtype`` (f16 or f32)."""
    return _entry("latent_kv", "latent.c", "latent ldl rope ldr kv latent_width rope_width page_tokens", dtype)


_ATTENTION = "q ldr y kv heads rope latent page_tokens scale period split split_bytes q_rope"


def latent_attention(dtype: str) -> KernelEntry:
    """Attention of all heads over one key a token; its cost follows the live length."""
    return _entry("latent_attention", "latent.c", _ATTENTION, dtype)


def sparse_latent_attention(dtype: str) -> KernelEntry:
    """The same over selected positions, whose number bounds the cost."""
    return _entry("sparse_latent_attention", "latent.c", f"{_ATTENTION} positions top_k", dtype)


def index_kv(dtype: str) -> KernelEntry:
    """Writes the index keys of a step to the pool."""
    return _entry("index_kv", "index.c", "k ldk kv head_dim page_tokens", dtype)


def index_select(dtype: str) -> KernelEntry:
    """The best keys of every row; its cost follows the live length."""
    return _entry("index_select", "index.c", _INDEX, dtype)


def index_parts_bytes(rows: int, top_k: int) -> int:
    """Bytes that let index_select split long contexts over threads in steps of up to ``rows`` rows (index.h)."""
    return 4 * rows * _SPLITS * ((2 * top_k + 16) // 16 * 16)
