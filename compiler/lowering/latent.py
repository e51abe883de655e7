"""Latent attention on the CPU: views of columns, partial rotation in place, the latent cache, selection of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tapeout.compiler.ir import Op
from tapeout.compiler.kernels import grouped, latent, linear, simple
from tapeout.compiler.layouts import TILE_ROWS
from tapeout.compiler.lowering.base import SPLIT_ROWS
from tapeout.compiler.lowering.caches import KV_BYTES
from tapeout.compiler.stages import (
    Arg,
    Buffer,
    Capacity,
    Decision,
    KernelEntry,
    KvRef,
    Produced,
    SizeOf,
    Span,
    WeightRef,
)
from tapeout.runtime.errors import TapeoutError

if TYPE_CHECKING:
    from tapeout.compiler.lowering.cpu import CpuLowering

_PERIODIC = frozenset(("rotate", "latent_attention", "sparse_latent_attention"))
"""Kinds of ops whose kernels take heads that lie apart."""
_STRIDED = _PERIODIC | {"rmsnorm", "layernorm"}
"""Kinds of ops whose kernels take rows that lie apart."""


def columns(lowering: CpuLowering, op: Op) -> None:
    """A view where every reader's kernel takes one, otherwise a copy."""
    period, groups = op.integer("period"), lowering.width(op.inputs[0]) // op.integer("period")
    source = lowering.place[op.inputs[0]]
    x = Span(source.buffer, source.column + op.integer("start"))
    takes_views = _STRIDED if groups == 1 else _PERIODIC
    if all(reader.kind in takes_views for reader in lowering.consumers[op.name]):
        lowering.place[op.name] = x
        return
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    args = (x, lowering.stride(x), y, groups, period, op.width // groups)
    lowering.emit(latent.GATHER_COLUMNS, op, args, (x,), (y,), (Produced(op.name, 0, op.width),))


def period_of(lowering: CpuLowering, value: str, width: int) -> int:
    """Columns from one head of a value to the next, in the buffer where it lies; ``width`` are those of a head."""
    producer = lowering.producer[value]
    if producer.kind == "rotate":
        return period_of(lowering, producer.inputs[0], width)
    if producer.kind == "columns" and lowering.place[value] != Span(value):
        return producer.integer("period")
    return width


def rotate(lowering: CpuLowering, op: Op) -> None:
    """Turns the channels where they lie, so nothing else may read them unturned."""
    value = op.inputs[0]
    if len(lowering.consumers[value]) != 1:
        raise TapeoutError(f"{op.name}: the CPU kernel rotates in place, but {value} has other readers")
    source = lowering.place[op.name] = lowering.place[value]
    x = Span(source.buffer, source.column + op.integer("start"))
    heads = op.width // op.integer("period")
    period = period_of(lowering, value, op.integer("period"))
    table = _rope_table(lowering, op)
    shape = (heads, period, op.integer("rotated"), op.integer("pairs"), op.integer("sign"))
    lowering.emit(latent.ROTATE, op, (x, lowering.stride(x), table, *shape), (x, table), (x,))


def _rope_table(lowering: CpuLowering, op: Op) -> Span:
    """Cosines and sines of every row, made by the first op that needs them."""
    name, width = f"{op.weights[0]}.table", op.integer("rotated")
    if name in lowering.buffers:
        return Span(name)
    table = lowering.f32_buffer(name, width)
    args = (WeightRef(op.weights[0]), table, width, op.number("factor"))
    lowering.emit(simple.ROPE_TABLE, op, args, (), (table,))
    return table


def layernorm(lowering: CpuLowering, op: Op) -> None:
    """Over whole rows."""
    x = lowering.place[op.inputs[0]]
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    weight, bias = (WeightRef(name) for name in op.weights)
    args = (x, lowering.stride(x), weight, bias, y, op.width, op.number("eps"))
    lowering.emit(latent.LAYERNORM, op, args, (x,), (y,), (Produced(op.name, 0, op.width),))


def head_linear(lowering: CpuLowering, op: Op) -> None:
    """One product a head, all of one launch."""
    slot, heads = op.weights[0], op.integer("heads")
    n, k = op.width // heads, lowering.slots[slot].shape[1]
    format = lowering.format(slot)
    takes_x8 = linear.takes_x8(format)
    if n % TILE_ROWS or (takes_x8 and k % 32):
        raise TapeoutError(
            f"{op.name}: heads of {k} to {n} channels; the CPU kernel for {format} needs outputs in multiples of "
            f"{TILE_ROWS}{' and inputs in multiples of 32' if takes_x8 else ''}"
        )
    x = lowering.x8(op.inputs[0], op) if takes_x8 else lowering.place[op.inputs[0]]
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    terms = lowering.buffers[x.buffer].terms if takes_x8 else 1
    none = (0, 0, 0, 0)
    args = (x, WeightRef(slot), y, n, k, Capacity(terms), op.width, grouped.STORE, *none, heads, 0.0, terms)
    kernel = grouped.kernel(format)
    lowering.emit(kernel, op, args, (x,), (y,), (Produced(op.name, 0, op.width),))
    reason = f"serves {format} as stored, layout {linear.LAYOUT}; all {heads} heads in one launch"
    lowering.decisions.append(Decision("select_kernels", op.name, kernel.name, reason))
    if terms > 1:
        lowering.record_terms(op)


def latent_attention(lowering: CpuLowering, op: Op) -> None:
    """This step's keys to their pages, then attention, split over keys where the context is long."""
    _attend(lowering, op, latent.latent_attention(lowering.serving.kv_dtype), ())


def sparse_latent_attention(lowering: CpuLowering, op: Op) -> None:
    """The same over selected positions."""
    positions = lowering.place[op.inputs[4]]
    kernel = latent.sparse_latent_attention(lowering.serving.kv_dtype)
    _attend(lowering, op, kernel, (positions, lowering.width(op.inputs[4])))


def _attend(lowering: CpuLowering, op: Op, kernel: KernelEntry, selection: tuple[Arg, ...]) -> None:
    heads, width, rope = op.integer("heads"), op.integer("latent"), op.integer("rope")
    kv = _write_keys(lowering, op, width, rope)
    q, q_rope = (lowering.place[name] for name in op.inputs[:2])
    assert (q.column, lowering.stride(q)) == (0, heads * width), f"{op.name}: the kernel takes dense queries"
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    split = Span(f"{op.name}.split")
    size = simple.attention_split_bytes(1, heads, width)
    lowering.buffers[split.buffer] = Buffer(split.buffer, size, "scratch", max_rows=SPLIT_ROWS)
    page_tokens, scale = lowering.serving.page_tokens, op.number("scale")
    shape = (heads, rope, width, page_tokens, scale, period_of(lowering, op.inputs[1], rope))
    args = (q, lowering.stride(q_rope), y, kv, *shape, split, SizeOf(split.buffer), q_rope, *selection)
    reads = (q, q_rope, *(item for item in selection if isinstance(item, Span)))
    lowering.emit(kernel, op, args, reads, (y, split))
    combine: dict[str, Arg] = {"q": q, "y": y, "kv": kv, "heads": heads, "kv_heads": 1, "head_dim": width}
    combine |= {"page_tokens": page_tokens, "scale": scale, "split": split, "split_bytes": SizeOf(split.buffer)}
    args = tuple(combine.get(name, 0) for name in simple.ATTENTION_COMBINE.params)
    lowering.emit(simple.ATTENTION_COMBINE, op, args, (y, split), (y,), (Produced(op.name, 0, op.width),))


def _write_keys(lowering: CpuLowering, op: Op, width: int, rope: int) -> KvRef:
    """This step's keys to their pages, in a cache of their own."""
    if width % 8 or rope % 8 or width > latent.MAX_LATENT or width + rope > latent.MAX_KEY:
        raise TapeoutError(
            f"{op.name}: keys of {width} latent and {rope} rope channels; the CPU kernel takes multiples of 8, at most "
            f"{latent.MAX_LATENT} latent and {latent.MAX_KEY} together"
        )
    dtype, page_tokens = lowering.serving.kv_dtype, lowering.serving.page_tokens
    (kv,) = lowering.caches_for(op)
    c, k_rope = (lowering.place[name] for name in op.inputs[2:4])
    write = (c, lowering.stride(c), k_rope, lowering.stride(k_rope), kv, width, rope, page_tokens)
    lowering.emit(latent.latent_kv(dtype), op, write, (c, k_rope), ())
    heads, per_token = op.integer("heads"), (width + rope) * KV_BYTES[dtype]
    reason = f"absorbed: all {heads} heads share one key of {width + rope} channels, whose first {width} are the value"
    other = ("a key and a value for every head", f"a token would leave {heads} of each in the cache")
    evidence = (("bytes_a_token", per_token),)
    lowering.decisions.append(Decision("select_kernels", op.name, "latent attention", reason, (other,), evidence))
    return kv


def index_select(lowering: CpuLowering, op: Op) -> None:
    """This step's index keys to their pages, then the selection."""
    heads, head_dim, top_k = op.integer("heads"), op.integer("head_dim"), op.integer("top_k")
    if heads > latent.MAX_INDEX_HEADS or heads * head_dim > latent.MAX_INDEX_QUERIES or top_k > latent.MAX_TOP_K:
        raise TapeoutError(
            f"{op.name}: {heads} index heads of {head_dim} channels that select {top_k} keys; the CPU kernel takes at "
            f"most {latent.MAX_INDEX_HEADS} heads, {latent.MAX_INDEX_QUERIES} channels in all, {latent.MAX_TOP_K} keys"
        )
    dtype, page_tokens = lowering.serving.kv_dtype, lowering.serving.page_tokens
    (kv,) = lowering.caches_for(op)
    q, k, weights = (lowering.place[name] for name in op.inputs)
    write = (k, lowering.stride(k), kv, head_dim, page_tokens)
    lowering.emit(latent.index_kv(dtype), op, write, (k,), ())
    y = lowering.place[op.name] = lowering.f32_buffer(op.name, op.width)
    parts = Span(f"{op.name}.parts")
    size = latent.index_parts_bytes(1, top_k)
    lowering.buffers[parts.buffer] = Buffer(parts.buffer, size, "scratch", max_rows=SPLIT_ROWS)
    shape = (heads, head_dim, weights, lowering.stride(weights), page_tokens, top_k, op.number("scale"))
    args = (q, lowering.stride(q), y, kv, *shape, parts, SizeOf(parts.buffer))
    lowering.emit(latent.index_select(dtype), op, args, (q, weights), (y, parts))
    lowering.emit(latent.INDEX_MERGE, op, args, (y, parts), (y,), (Produced(op.name, 0, op.width),))


HANDLERS = {
    "columns": columns,
    "rotate": rotate,
    "layernorm": layernorm,
    "head_linear": head_linear,
    "latent_attention": latent_attention,
    "sparse_latent_attention": sparse_latent_attention,
    "index_select": index_select,
}
