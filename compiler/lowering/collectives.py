"""Where the ranks of a CPU artifact exchange values: launches of collectives over memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tapeout.compiler.ir import Op
from tapeout.compiler.kernels import collective
from tapeout.compiler.lowering.base import HIDDEN
from tapeout.compiler.stages import AtLeast, CommRef, Decision, Produced, Span

if TYPE_CHECKING:
    from tapeout.compiler.lowering.cpu import CpuLowering


def all_reduce(lowering: CpuLowering, op: Op) -> None:
    """The sum over ranks; straight into the residual stream where it is added there next."""
    x, width = lowering.place[op.inputs[0]], op.width
    residual = lowering.residual_of(op)
    y, value = (Span(HIDDEN), residual.name) if residual else (lowering.f32_buffer(op.name, width), op.name)
    add = int(residual is not None)
    least = collective.two_shot_rows(width)
    sizes = (lowering.stride(y), width, CommRef(), add, AtLeast(least))
    args = (x, lowering.stride(x), y, *sizes)
    reads = (x, y) if residual else (x,)
    lowering.emit(collective.ALL_REDUCE, op, args, reads, (y,), (Produced(value, 0, width),))
    lowering.place[value] = y
    lowering.done |= {residual.name} if residual else set()
    lowering.decisions.append(_shots(op, least))


def _shots(op: Op, least: int) -> Decision:
    reason = "it reads 2 operands instead of one a rank, but meets the others twice; the sum is the same bits"
    rivals = (("one shot in all lists", "many rows would be read once a rank"),
              ("two shots in all lists", "a meeting costs more than reading few rows"))  # fmt: skip
    choice = f"reduce-scatter and all-gather in lists of {least} rows and more, one shot in others"
    return Decision("select_kernels", op.name, choice, reason, rivals, (("bytes_a_row", 4 * op.width),))


def all_gather(lowering: CpuLowering, op: Op) -> None:
    """The columns of all ranks side by side, without the padding of the last."""
    x, y = lowering.place[op.inputs[0]], lowering.f32_buffer(op.name, op.width)
    k = lowering.width(op.inputs[0])
    args = (x, lowering.stride(x), y, op.width, k, CommRef(), op.width)
    lowering.emit(collective.ALL_GATHER, op, args, (x,), (y,), (Produced(op.name, 0, op.width),))
    lowering.place[op.name] = y


HANDLERS: Mapping[str, Callable[[CpuLowering, Op], None]] = {"all_reduce": all_reduce, "all_gather": all_gather}
