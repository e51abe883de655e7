"""What an op keeps of the past, whatever device runs it: the caches of the KV pool and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tapeout.compiler.ir import Op
from tapeout.compiler.spec import Serving
from tapeout.compiler.stages import Cache

KV_BYTES = {"f16": 2, "f32": 4}
RING_BYTES = 4  # rings of what is not paged hold float32

Widths = Callable[[str], int]


def caches_of(op: Op, serving: Serving, width: Widths) -> tuple[Cache, ...]:
    """The caches of an op, in the order in which its launches name them. ``width`` says the columns of a value."""
    kind = _KINDS.get(op.kind)
    return kind(op, serving, width) if kind else ()


def _heads(op: Op, serving: Serving, width: Widths) -> tuple[Cache, ...]:
    del width
    return (_paged(f"layer.{op.integer('layer')}", 2 * op.integer("kv_heads") * op.integer("head_dim"), serving),)


def _latent(op: Op, serving: Serving, width: Widths) -> tuple[Cache, ...]:
    del width
    return (_paged(f"layer.{op.integer('layer')}", op.integer("latent") + op.integer("rope"), serving),)


def _index(op: Op, serving: Serving, width: Widths) -> tuple[Cache, ...]:
    del width
    return (_paged(f"layer.{op.integer('layer')}.index", op.integer("head_dim"), serving),)


def _paged(name: str, channels: int, serving: Serving) -> Cache:
    return Cache(name, serving.page_tokens * channels * KV_BYTES[serving.kv_dtype])


def _compressed(op: Op, serving: Serving, width: Widths) -> tuple[Cache, ...]:
    """Entries in pages, and of each sequence the rows of the windows that are still open."""
    ratio = op.integer("ratio")
    entries = -(-serving.page_tokens // ratio) * op.width * KV_BYTES[serving.kv_dtype]
    rows, columns = ratio * (1 + op.integer("overlap")), 2 * width(op.inputs[0])
    return (Cache(op.name, entries), Cache(f"{op.name}.window", 0, RING_BYTES * rows * columns))


def _window(op: Op, serving: Serving, width: Widths) -> tuple[Cache, ...]:
    del serving
    return (Cache(f"{op.name}.window", 0, RING_BYTES * op.integer("window") * width(op.inputs[1])),)


_KINDS: Mapping[str, Callable[[Op, Serving, Widths], tuple[Cache, ...]]] = {
    "attention": _heads,
    "latent_attention": _latent,
    "sparse_latent_attention": _latent,
    "index_select": _index,
    "compress": _compressed,
    "window_attention": _window,
    "compressed_attention": _window,
    "sparse_compressed_attention": _window,
}
