"""Kernels of DeepSeek-V4: residual streams, the compressor and its rings, attention over a window and entries."""

from __future__ import annotations

from dataclasses import replace

from tapeout.compiler.kernels import latent
from tapeout.compiler.stages import KernelEntry

MAX_STREAMS = 8
MAX_HEAD_DIM = 1024
MAX_SLOTS = 512
"""Rows that make up one entry, at most (compress.c)."""
MAX_INDEX_HEADS, MAX_INDEX_DIM, MAX_TOP_K = 128, 256, 4096
"""Heads, their channels, and selected entries, at most (select_entries.c)."""


def _entry(name: str, source: str, params: str, dtype: str = "") -> KernelEntry:
    """A kernel; those over entries are compiled once a ``dtype`` of them."""
    defines = (("TP_KV_F16", "1" if dtype == "f16" else "0"),) if dtype else ()
    full = f"{name}_{dtype}" if dtype else name
    return KernelEntry(full, source.removesuffix(".c"), tuple(params.split()), source, defines)


REPEAT = _entry("repeat_f32", "rows.c", "x y k times")
UNIT_NORM = _entry("unit_norm", "rows.c", "x ldx columns group eps")
KEEP_ROWS = _entry("keep_rows", "rows.c", "x ldx width ring size")
HYPER_WEIGHTS = _entry("hyper_weights", "hyper.c", "x k f ldf base scale y streams iterations norm_eps eps")
HYPER_MIX = _entry("hyper_mix", "hyper.c", "x weights ldw y k streams")
ROUTE_BY_TOKEN = _entry("route_by_token", "experts.c", "x ldx table y experts top_k score normalize scale")
HYPER_JOIN = _entry("hyper_join", "hyper.c", "y weights ldw block ldy k streams")


def compress(dtype: str) -> KernelEntry:
    """Entries of windows that end in this step, to their pages in ``dtype`` (f16 or f32) and to their rows."""
    params = "x ldx ape norm inv_freq ring entries y d ratio overlap rotated page_tokens eps"
    return _entry("compress", "compress.c", params, dtype)


def select_entries(dtype: str) -> KernelEntry:
    """The best entries of every row; its cost follows the live length. ``MERGE`` follows, with its arguments."""
    params = "q ldq y entries heads head_dim weights ldw page_tokens top_k scale parts parts_bytes ratio"
    return _entry("select_entries", "select_entries.c", params, dtype)


MERGE = replace(latent.INDEX_MERGE, params=(*latent.INDEX_MERGE.params, "ratio"))


def attention(dtype: str) -> KernelEntry:
    """Attention over the window, and over entries where there are some."""
    params = "q kv ldkv y ring entries selection top_k sinks heads d window ratio page_tokens scale"
    return _entry("compressed_attention", "compressed.c", params, dtype)
