"""Where the ranks of a CPU artifact exchange values: launches of collectives over memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tapeout.compiler.ir import Op
from tapeout.compiler.kernels import collective
from tapeout.compiler.lowering.base import HIDDEN
from tapeout.compiler.stages import CommRef, Produced, Span

if TYPE_CHECKING:
    from tapeout.compiler.lowering.cpu import CpuLowering


def all_reduce(lowering: CpuLowering, op: Op) -> None:
    """The sum over ranks; straight into the residual stream where it is added there next."""
    x, width, ranks = lowering.place[op.inputs[0]], op.width, lowering.fused.sharded.mesh.count
    residual = lowering.residual_of(op)
    y, value = (Span(HIDDEN), residual.name) if residual else (lowering.f32_buffer(op.name, width), op.name)
    add = int(residual is not None)
    rows = lowering.serving.max_sequences
    sizes = (lowering.stride(y), width, CommRef(), add, int(collective.two_shot(ranks, rows, width)))
    args = (x, lowering.stride(x), y, *sizes)
    reads = (x, y) if residual else (x,)
    lowering.emit(collective.ALL_REDUCE, op, args, reads, (y,), (Produced(value, 0, width),))
    lowering.place[value] = y
    lowering.done |= {residual.name} if residual else set()


def all_gather(lowering: CpuLowering, op: Op) -> None:
    """The columns of all ranks side by side, without the padding of the last."""
    x, y = lowering.place[op.inputs[0]], lowering.f32_buffer(op.name, op.width)
    k = lowering.width(op.inputs[0])
    args = (x, lowering.stride(x), y, op.width, k, CommRef(), op.width)
    lowering.emit(collective.ALL_GATHER, op, args, (x,), (y,), (Produced(op.name, 0, op.width),))
    lowering.place[op.name] = y


HANDLERS: Mapping[str, Callable[[CpuLowering, Op], None]] = {"all_reduce": all_reduce, "all_gather": all_gather}
