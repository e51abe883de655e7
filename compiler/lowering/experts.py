"""Mixtures of experts on the CPU: rows are routed, sorted by expert, multiplied with these alone, and summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tapeout.compiler.ir import Op
from tapeout.compiler.kernels import experts, grouped, linear, simple
from tapeout.compiler.kernels.base import x8_bytes
from tapeout.compiler.layouts import TILE_ROWS, packed_bytes
from tapeout.compiler.lowering.base import HIDDEN
from tapeout.compiler.stages import Arg, Buffer, Capacity, Decision, Produced, RankOf, Span, WeightRef
from tapeout.runtime.errors import TapeoutError

if TYPE_CHECKING:
    from tapeout.compiler.lowering.cpu import CpuLowering


def route(lowering: CpuLowering, op: Op) -> None:
    """Choose experts for every row, and say which pairs of row and expert each expert has."""
    logits, top_k = lowering.place[op.inputs[0]], op.integer("top_k")
    count = lowering.width(op.inputs[0])
    if count > experts.MOST:
        raise TapeoutError(
            f"{op.name}: the CPU kernel routes among at most {experts.MOST} experts, and there are {count}"
        )
    y = lowering.f32_buffer(op.name, op.width)
    score = experts.SCORES.index(str(op.attr("score")))
    bias: Arg = WeightRef(op.weights[0]) if op.weights else 0
    groups = (op.integer("groups"), op.integer("top_groups"), experts.GROUP_SCORES.index(str(op.attr("group_score"))))
    last = (op.integer("normalize"), op.number("scale"))
    args = (logits, lowering.stride(logits), y, count, top_k, score, bias, *groups, *last)
    lowering.emit(experts.ROUTE, op, args, (logits,), (y,), (Produced(op.name, 0, op.width),))
    lowering.place[op.name] = y
    dispatch(lowering, op, count)


def dispatch(lowering: CpuLowering, op: Op, count: int) -> None:
    """Sort the pairs of a route among those of ``count`` experts that a rank holds; its value must lie in place."""
    y, top_k, mesh = lowering.place[op.name], op.width // 2, lowering.fused.sharded.mesh
    starts, row_of, weight = _dispatched(op.name)
    held = count // mesh.expert
    first: Arg = RankOf(mesh.within, held) if mesh.expert > 1 else 0
    sizes = (
        Buffer(starts.buffer, experts.starts_bytes(held), "scratch", max_rows=1),
        Buffer(row_of.buffer, 4 * top_k, "scratch"),
        Buffer(weight.buffer, 4 * top_k, "scratch"),
    )
    lowering.buffers |= {buffer.name: buffer for buffer in sizes}
    args = (y, top_k, held, starts, row_of, weight, first)
    lowering.emit(experts.DISPATCH, op, args, (y,), (starts, row_of, weight))


def _dispatched(route: str) -> tuple[Span, Span, Span]:
    """Where the starts of the experts, the row of each pair and its weight lie."""
    return Span(f"{route}.starts"), Span(f"{route}.row_of"), Span(f"{route}.weight")


def expert_linear(lowering: CpuLowering, op: Op) -> None:
    """The rows of each chosen expert times its gate and up, as one matrix with their activation or each apart."""
    top_k, gated = op.integer("top_k"), _gated(lowering, op)
    parts = [width // top_k for _, width in op.outputs]
    n = parts[0]
    _check_tiles(op, n)
    x, terms = _sorted(lowering, op)
    if len(parts) == 2:
        y, ldy = lowering.f32_buffer(gated.name, gated.width), n
        epilogue, limit = grouped.GATED[str(gated.attr("act"))], gated.number("limit")
    else:
        both = lowering.f32_buffer(f"{gated.name}.parts", 2 * gated.width)
        y, ldy = Span(both.buffer, n * gated.inputs.index(op.name)), 2 * n
        epilogue, limit = grouped.STORE, 0.0
    _multiply(lowering, op, x, y, (n, ldy, epilogue, limit, terms))
    lowering.place |= {name: y for name, _ in op.outputs}
    if all(name in lowering.place for name in gated.inputs):
        if len(parts) == 1:
            y = _activate(lowering, gated, top_k)
        lowering.place[gated.name] = y
        lowering.done.add(gated.name)


def _gated(lowering: CpuLowering, op: Op) -> Op:
    """The one reader of an expert's gate and up. Raises TapeoutError for other programs."""
    readers = [reader for name, _ in op.outputs for reader in lowering.consumers[name]]
    gated = readers[0]
    names = tuple(name for name, _ in op.outputs)
    if gated.kind != "gated" or any(reader is not gated for reader in readers) or not set(names) <= set(gated.inputs):
        raise TapeoutError(f"{op.name}: the CPU kernels compute experts whose gate and up meet in one gated value")
    if len(names) == 2 and names != gated.inputs:
        raise TapeoutError(f"{op.name}: the CPU kernels need the gate of an expert before its up")
    return gated


def _check_tiles(op: Op, n: int) -> None:
    if n % TILE_ROWS:
        raise TapeoutError(
            f"{op.name}: an expert has {n} rows; the CPU kernels multiply with experts of a multiple of {TILE_ROWS} "
            "rows"
        )


def _activate(lowering: CpuLowering, gated: Op, top_k: int) -> Span:
    """The gated value of products that were stored side by side."""
    x, y = lowering.place[gated.inputs[0]], lowering.f32_buffer(gated.name, gated.width)
    n = gated.width // top_k
    args = (Span(x.buffer), 2 * n, y, n, gated.number("limit"), top_k)
    lowering.emit(simple.GATED[str(gated.attr("act"))], gated, args, (x,), (y,))
    return y


def _sorted(lowering: CpuLowering, op: Op) -> tuple[Span, int]:
    """The input's row of every pair, sorted by expert, as the weight's kernel takes it, and its 8-bit terms."""
    value, top_k = op.inputs[0], op.integer("top_k")
    columns, row_of = lowering.width(value), _dispatched(op.inputs[1])[1]
    if not linear.takes_x8(lowering.format(op.weights[0])):
        y, x = Span(f"{value}.sorted"), lowering.place[value]
        if y.buffer not in lowering.buffers:
            lowering.f32_buffer(y.buffer, top_k * columns)
            args = (x, lowering.stride(x), y, columns, row_of, top_k)
            lowering.emit(experts.SORT_F32, op, args, (x, row_of), (y,))
        return y, 1
    y, x = Span(f"{value}.sorted_x8"), lowering.x8(value, op)
    terms = lowering.buffers[x.buffer].terms
    if y.buffer not in lowering.buffers:
        lowering.buffers[y.buffer] = Buffer(y.buffer, x8_bytes(columns) * top_k * terms, "scratch")
        args = (x, Capacity(terms), y, Capacity(top_k * terms), columns, row_of, top_k, terms)
        lowering.emit(experts.SORT_X8, op, args, (x, row_of), (y,))
    return y, terms


def expert_sum(lowering: CpuLowering, op: Op) -> None:
    """The weighted sum over chosen experts of their last product, into the residual stream where it goes there next."""
    top_k, (h, route) = op.integer("top_k"), op.inputs
    _check_tiles(op, op.width)
    x, columns = lowering.place[h], lowering.width(h) // top_k
    if linear.takes_x8(lowering.format(op.weights[0])):
        y = Span(f"{h}.x8")
        lowering.buffers[y.buffer] = Buffer(y.buffer, x8_bytes(columns) * top_k, "scratch")
        lowering.emit(experts.PAIRS_X8, op, (x, y, columns, Capacity(top_k), top_k), (x,), (y,))
        x = y
    residual = lowering.residual_of(op)
    if residual is not None:
        y, value = Span(HIDDEN), residual.name
        lowering.done.add(residual.name)
    else:
        y, value = lowering.f32_buffer(op.name, op.width), op.name
        lowering.emit(experts.ZERO_F32, op, (y, op.width), (), (y,))
    parts = Span(f"{op.name}.parts")
    rows = -(-experts.FEW_PAIRS // top_k)  # a rank that holds some experts has any number of pairs
    lowering.buffers[parts.buffer] = Buffer(parts.buffer, 4 * op.width * top_k, "scratch", max_rows=rows)
    starts, row_of, weight = _dispatched(route)
    sizes = (op.width, lowering.stride(y), grouped.ADD, parts, 1)
    _multiply(lowering, op, x, y, sizes, (row_of, weight))
    args, produced = (parts, y, op.width, row_of, starts, op.integer("experts")), Produced(value, 0, op.width)
    lowering.emit(experts.ADD_PAIRS, op, args, (parts, row_of, starts, y), (y,), (produced,))
    lowering.place[value] = y


def _multiply(lowering: CpuLowering, op: Op, x: Span, y: Span, sizes: tuple[int, int, int, Arg, int],
              pairs: tuple[Span, ...] = ()) -> None:  # fmt: skip
    """One grouped product; ``pairs`` says where the row of y and the weight of each row of x stand."""
    (n, ldy, epilogue, extra, terms), slot = sizes, op.weights[0]
    format, count, top_k = lowering.format(slot), op.integer("experts"), op.integer("top_k")
    kernel, k, starts = grouped.kernel(format), lowering.slots[slot].shape[1], _dispatched(op.inputs[1])[0]
    bias: Arg = WeightRef(op.weights[1]) if len(op.weights) > 1 else 0
    where = (starts, *(pairs or (0, 0)), count, extra, terms)
    args = (x, WeightRef(slot), y, n, k, Capacity(top_k * terms), ldy, epilogue, bias, *where)
    added = (y, extra) if isinstance(extra, Span) else ()
    lowering.emit(kernel, op, args, (x, starts, *pairs, *added[:1]), (y, *added[1:]))
    nbytes = packed_bytes(lowering.slots[slot].shape, format, linear.LAYOUT)
    every = count * lowering.fused.sharded.mesh.expert  # experts of all ranks, of which a row chooses
    why = f"a decode step would read {every / top_k:.0f} times the weights"
    reason = f"serves {format} as stored, layout {linear.LAYOUT}; only chosen experts are read"
    evidence = (("experts", count), ("top_k", top_k), ("bytes", nbytes), ("decode_bytes", nbytes * top_k // every))
    other = ("every row through every expert", why)
    lowering.decisions.append(Decision("select_kernels", op.name, kernel.name, reason, (other,), evidence))


HANDLERS: Mapping[str, Callable[[CpuLowering, Op], None]] = {
    "route": route,
    "expert_linear": expert_linear,
    "expert_sum": expert_sum,
}
