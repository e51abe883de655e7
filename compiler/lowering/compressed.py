"""DeepSeek-V4 on the CPU: residual streams, compressed entries in pages, and windows that are state of their own.

What a sequence keeps that is not paged lies in rings of float32 rows, one a sequence. They are read before the rows of
the step are kept, and only where the sequence has written: a new sequence needs no reset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tapeout.compiler.ir import Op
from tapeout.compiler.kernels import compressed, experts, latent
from tapeout.compiler.lowering.base import SPLIT_ROWS
from tapeout.compiler.lowering.experts import dispatch
from tapeout.compiler.stages import Arg, Buffer, KvRef, Produced, SizeOf, Span, WeightRef
from tapeout.runtime.errors import TapeoutError

if TYPE_CHECKING:
    from tapeout.compiler.lowering.cpu import CpuLowering

STREAMS = "streams"


def repeat(lowering: CpuLowering, op: Op) -> None:
    """The streams, which every hyper_join updates in place; the head reads them too."""
    x = lowering.place[op.inputs[0]]
    y = lowering.place[op.name] = lowering.f32_buffer(STREAMS, op.width, pinned=True)
    args = (x, y, lowering.width(op.inputs[0]), op.integer("times"))
    lowering.emit(compressed.REPEAT, op, args, (x,), (y,), (Produced(op.name, 0, op.width),))


def unit_norm(lowering: CpuLowering, op: Op) -> None:
    """In place, so nothing else may read what it norms."""
    value, group = op.inputs[0], op.integer("group")
    if len(lowering.consumers[value]) != 1 or group % 8:
        raise TapeoutError(f"{op.name}: the CPU kernel norms groups of a multiple of 8 in place, for one reader")
    x = lowering.place[op.name] = lowering.place[value]
    args = (x, lowering.stride(x), op.width, group, op.number("eps"))
    lowering.emit(compressed.UNIT_NORM, op, args, (x,), (x,))


def hyper_weights(lowering: CpuLowering, op: Op) -> None:
    """From the streams and their product with fn."""
    streams = op.integer("streams")
    if streams > compressed.MAX_STREAMS:
        raise TapeoutError(
            f"{op.name}: {streams} residual streams; the CPU kernels mix at most {compressed.MAX_STREAMS}"
        )
    x, f = (lowering.place[name] for name in op.inputs)
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    base, scale = (WeightRef(name) for name in op.weights)
    numbers = (op.integer("iterations"), op.number("norm_eps"), op.number("eps"))
    args = (x, lowering.width(op.inputs[0]), f, lowering.stride(f), base, scale, y, streams, *numbers)
    lowering.emit(compressed.HYPER_WEIGHTS, op, args, (x, f), (y,), (Produced(op.name, 0, op.width),))


def hyper_mix(lowering: CpuLowering, op: Op) -> None:
    """The input of a block."""
    x, weights = (lowering.place[name] for name in op.inputs)
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    args = (x, weights, lowering.stride(weights), y, op.width, op.integer("streams"))
    lowering.emit(compressed.HYPER_MIX, op, args, (x, weights), (y,), (Produced(op.name, 0, op.width),))


def hyper_join(lowering: CpuLowering, op: Op) -> None:
    """Into the streams, which everything else that reads them has read by now."""
    x, weights, block = (lowering.place[name] for name in op.inputs)
    others = [reader for reader in lowering.consumers[op.inputs[0]] if reader is not op]
    assert all(reader.name in lowering.done for reader in others), op.name
    lowering.place[op.name] = x
    streams = op.integer("streams")
    args = (x, weights, lowering.stride(weights), block, lowering.stride(block), op.width // streams, streams)
    lowering.emit(compressed.HYPER_JOIN, op, args, (x, weights, block), (x,), (Produced(op.name, 0, op.width),))


def compress(lowering: CpuLowering, op: Op) -> None:
    """Entries of the windows that end in this step, then the rows that the next step needs."""
    ratio, overlap, rotated = op.integer("ratio"), op.integer("overlap"), op.integer("rotated")
    columns, slots = 2 * lowering.width(op.inputs[0]), ratio * (1 + overlap)
    if op.width % 16 or op.width > compressed.MAX_HEAD_DIM or slots > compressed.MAX_SLOTS:
        raise TapeoutError(
            f"{op.name}: entries of {op.width} channels from {slots} rows; the CPU kernel makes entries of a multiple "
            f"of 16 channels, at most {compressed.MAX_HEAD_DIM}, from at most {compressed.MAX_SLOTS} rows"
        )
    x, g = (lowering.place[name] for name in op.inputs)
    if g != Span(x.buffer, x.column + columns // 2):
        raise TapeoutError(f"{op.name}: the CPU kernel needs c and its gate side by side, c first")
    dtype, page_tokens = lowering.serving.kv_dtype, lowering.serving.page_tokens
    entries, ring = lowering.caches_for(op)
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    weights = tuple(WeightRef(name) for name in op.weights)
    shape = (op.width, ratio, overlap, rotated, page_tokens, op.number("eps"))
    args = (x, lowering.stride(x), *weights, ring, entries, y, *shape)
    lowering.emit(compressed.compress(dtype), op, args, (x,), (y,), (Produced(op.name, 0, op.width),))
    _keep(lowering, op, x, columns, ring, slots)


def _keep(lowering: CpuLowering, op: Op, x: Span, columns: int, ring: KvRef, size: int) -> None:
    """The last ``size`` rows of every sequence go to its ring."""
    lowering.emit(compressed.KEEP_ROWS, op, (x, lowering.stride(x), columns, ring, size), (x,), ())


def _entries(lowering: CpuLowering, value: str) -> KvRef:
    """The cache of a compress."""
    return KvRef(next(index for index, cache in enumerate(lowering.caches) if cache.name == value))


def select_entries(lowering: CpuLowering, op: Op) -> None:
    """The selection, split over entries where the context is long."""
    heads, head_dim, top_k = op.integer("heads"), op.integer("head_dim"), op.integer("top_k")
    if heads > compressed.MAX_INDEX_HEADS or head_dim > compressed.MAX_INDEX_DIM or top_k > compressed.MAX_TOP_K:
        raise TapeoutError(
            f"{op.name}: {heads} index heads of {head_dim} channels that select {top_k} entries; the CPU kernel takes "
            f"at most {compressed.MAX_INDEX_HEADS} heads of {compressed.MAX_INDEX_DIM} channels and "
            f"{compressed.MAX_TOP_K} entries"
        )
    q, weights = (lowering.place[name] for name in op.inputs[:2])
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    parts = Span(f"{op.name}.parts")
    size = latent.index_parts_bytes(1, top_k)
    lowering.buffers[parts.buffer] = Buffer(parts.buffer, size, "scratch", max_rows=SPLIT_ROWS)
    shape = (heads, head_dim, weights, lowering.stride(weights), lowering.serving.page_tokens, top_k)
    args: tuple[Arg, ...] = (q, lowering.stride(q), y, _entries(lowering, op.inputs[2]), *shape, op.number("scale"))
    args = (*args, parts, SizeOf(parts.buffer), op.integer("ratio"))
    lowering.emit(compressed.select_entries(lowering.serving.kv_dtype), op, args, (q, weights), (y, parts))
    lowering.emit(compressed.MERGE, op, args, (y, parts), (y,), (Produced(op.name, 0, op.width),))


def attention(lowering: CpuLowering, op: Op) -> None:
    """Over the window, all or selected entries, and the sinks; then the step's keys go to the window."""
    value, key, *others = op.inputs
    q, kv = lowering.place[value], lowering.place[key]
    width, window, dtype = lowering.width(key), op.integer("window"), lowering.serving.kv_dtype
    if width % 16 or width > compressed.MAX_HEAD_DIM or q.column or lowering.stride(q) != op.width:
        raise TapeoutError(
            f"{op.name}: heads of {width} channels; the CPU kernel takes a multiple of 16, at most "
            f"{compressed.MAX_HEAD_DIM}, and all heads of a row side by side"
        )
    (ring,) = lowering.caches_for(op)
    entries: tuple[Arg, int] = (_entries(lowering, others[0]), op.integer("ratio")) if others else (0, 0)
    selection = [lowering.place[name] for name in others[1:]]
    selected: tuple[Arg, Arg] = (selection[0], lowering.width(others[1])) if selection else (0, 0)
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    shape = (op.integer("heads"), width, window, entries[1], lowering.serving.page_tokens, op.number("scale"))
    args = (q, kv, lowering.stride(kv), y, ring, entries[0], *selected, WeightRef(op.weights[0]), *shape)
    lowering.emit(compressed.attention(dtype), op, args, (q, kv, *selection), (y,), (Produced(op.name, 0, op.width),))
    _keep(lowering, op, kv, width, ring, window)


def route_by_token(lowering: CpuLowering, op: Op) -> None:
    """The experts of each row's token, and which pairs of row and expert each expert has."""
    x, count = lowering.place[op.inputs[0]], lowering.width(op.inputs[0])
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    shape = (count, op.integer("top_k"), experts.SCORES.index(str(op.attr("score"))), op.integer("normalize"))
    args = (x, lowering.stride(x), WeightRef(op.weights[0]), y, *shape, op.number("scale"))
    lowering.emit(compressed.ROUTE_BY_TOKEN, op, args, (x,), (y,), (Produced(op.name, 0, op.width),))
    dispatch(lowering, op, count)


HANDLERS: Mapping[str, Callable[[CpuLowering, Op], None]] = {
    "repeat": repeat,
    "unit_norm": unit_norm,
    "hyper_weights": hyper_weights,
    "hyper_mix": hyper_mix,
    "hyper_join": hyper_join,
    "compress": compress,
    "select_entries": select_entries,
    "window_attention": attention,
    "compressed_attention": attention,
    "sparse_compressed_attention": attention,
    "route_by_token": route_by_token,
}
