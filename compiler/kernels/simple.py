"""Kernels without a configuration: norms, activation quantization, rotary tables, attention, elementwise work."""

from __future__ import annotations

from tapeout.compiler.stages import KernelEntry


def _entry(name: str, source: str, *params: str) -> KernelEntry:
    return KernelEntry(name, source.removesuffix(".c"), params, source, ())


RMSNORM_F32 = _entry("rmsnorm_f32", "norm.c", "x", "ldx", "weight", "y", "k", "eps")
RMSNORM_X8 = _entry("rmsnorm_x8", "norm.c", "x", "ldx", "weight", "y", "k", "eps", "cap", "terms")
RMSNORM_ADD = _entry("rmsnorm_add", "norm.c", "x", "ldx", "weight", "y", "k", "eps")
QUANTIZE_X8 = _entry("quantize_x8", "norm.c", "x", "ldx", "y", "k", "cap", "terms")
ROPE_TABLE = _entry("rope_table", "rope.c", "inv_freq", "y", "d", "factor")
GATED = {
    act: _entry(name, "elementwise.c", "x", "ldx", "y", "k", "limit", "pairs")
    for act, name in {"silu": "gated_silu", "gelu_tanh": "gated_gelu", "swiglu_oai": "gated_swiglu_oai"}.items()
}
"""By act; ``pairs`` is how many rows of x and y a row of the step has: 1, or the experts that a row goes through."""
ADD_F32 = _entry("add_f32", "elementwise.c", "x", "y", "k")
GATHER_F32 = _entry("gather_f32", "elementwise.c", "x", "y", "k")

_ATTENTION = ("q", "ldq", "y", "kv", "heads", "kv_heads", "head_dim", "page_tokens", "scale", "window", "split",
              "split_bytes")  # fmt: skip
_SPLITS = 16  # TP_SPLITS of attention.h


def rope_kv(dtype: str) -> KernelEntry:
    """Rotation of q and k, and writing k and v to the pool in ``dtype`` (f16 or f32)."""
    return _entry(f"rope_kv_{dtype}", "rope.c", "q", "ldq", "k", "ldk", "v", "ldv", "table", "kv", "heads", "kv_heads",
                  "head_dim", "page_tokens", "q_norm", "k_norm", "eps")  # fmt: skip


def attention(dtype: str) -> KernelEntry:
    """Attention over the pool; its cost follows the live length."""
    defines = (("TP_KV_F16", "1" if dtype == "f16" else "0"),)
    return KernelEntry(f"attention_{dtype}", "attention", (*_ATTENTION, "sinks"), "attention.c", defines)


ATTENTION_COMBINE = KernelEntry("attention_combine", "attention_combine", _ATTENTION, "attention_combine.c", ())
"""Follows each attention launch that has a split buffer, with the same arguments but for the sinks."""


def attention_split_bytes(rows: int, heads: int, head_dim: int) -> int:
    """Bytes of split buffer that let attention split long contexts in steps of up to ``rows`` rows (attention.h)."""
    return 4 * rows * heads * _SPLITS * (head_dim + 16)
