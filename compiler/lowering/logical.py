"""A device without kernels for a program: one launch an op, for plans of what no kernel serves yet.

Weights, caches, lifetimes of values and collectives are those of any lowering; what differs is that nothing can run it.
"""

from __future__ import annotations

from dataclasses import replace

from tapeout.compiler.devices import CpuDevice, Device
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.ir import OP_KINDS, Op
from tapeout.compiler.layouts import planes_hold, tile16_holds
from tapeout.compiler.lowering.base import packed
from tapeout.compiler.lowering.buckets import cpu_buckets, cuda_buckets
from tapeout.compiler.lowering.caches import caches_of
from tapeout.compiler.spec import Serving
from tapeout.compiler.stages import (
    Arg,
    Buffer,
    Cache,
    Decision,
    FusedModel,
    KernelEntry,
    KvRef,
    Launch,
    Produced,
    Program,
    SelectedModel,
    Span,
    WeightRef,
)
from tapeout.runtime.backend import FLOAT_BYTES

NO_KERNEL = "none"
"""The template of a kernel that does not exist."""
_MOST_CACHES = 2


def lower_logical(fused: FusedModel, device: Device, serving: Serving, missing: str) -> SelectedModel:
    """Every op as a launch of a kernel that does not exist yet; ``missing`` says why there is none.

    Values between launches are bfloat16 on a GPU and float32 on a CPU, logits float32.
    """
    on_cpu = isinstance(device, CpuDevice)
    lowering = _Lowering(fused, serving, "f32" if on_cpu else "bf16")
    for op in fused.graph.ops:
        lowering.lower(op)
    body, head = tuple(lowering.body or ()), tuple(lowering.launches)
    context = serving.context_for(fused.logical.max_context)
    lists = {"prefill": body, "decode": body if on_cpu else (*body, *head), "head": head}
    why = (("kernels of the device", missing),)
    return SelectedModel(
        fused=fused,
        kernels=tuple(_entry(kind) for kind in sorted({launch.kernel for launch in (*body, *head)})),
        weights=packed(fused, {name: layout_of(r.format) for name, r in fused.recipes if len(r.shape) == 2}),
        buffers=_pinned(lowering.buffers, head),
        programs=tuple(
            Program(phase, rows, lists[phase])
            for phase, rows in (cpu_buckets(serving, context) if on_cpu else cuda_buckets(serving, context))
        ),
        logits=lowering.place[fused.graph.output].buffer,
        caches=tuple(lowering.caches),
        decisions=(
            Decision("select_kernels", "program", "one launch an op, of no kernel", "a plan without kernels", why),
        ),
    )


def layout_of(format: str) -> str:
    """The layout that a kernel for a number format would read: that of GPU kernels, or else of CPU kernels."""
    if FORMATS[format].is_float:
        return "raw"
    return "planes" if planes_hold(format) else "tile16" if tile16_holds(format) else "raw"


def _entry(kind: str) -> KernelEntry:
    return KernelEntry(kind, NO_KERNEL, _params(kind), "", ())


def _params(kind: str) -> tuple[str, ...]:
    known = OP_KINDS[kind]
    inputs = (f"x{index}" for index in range(known.inputs))
    weights = (f"w{index}" for index in range(known.weights[1]))
    caches = (f"kv{index}" for index in range(_MOST_CACHES))
    return (*inputs, *weights, *caches, "y", "k", *sorted(known.attrs))


def _pinned(buffers: dict[str, Buffer], head: tuple[Launch, ...]) -> tuple[Buffer, ...]:
    """Buffers that a head list reads and a body list writes outlive their list."""
    written = {name for launch in head for name in launch.writes}
    kept = {name for launch in head for name in launch.reads} - written
    return tuple(replace(buffer, pinned=name in kept) for name, buffer in buffers.items())


class _Lowering:
    """Walks the program once; a cut of columns is a view of what it cuts."""

    def __init__(self, fused: FusedModel, serving: Serving, kind: str) -> None:
        self.fused, self.serving, self.kind = fused, serving, kind
        self.widths = fused.graph.widths
        self.place: dict[str, Span] = {}
        self.buffers: dict[str, Buffer] = {}
        self.caches: list[Cache] = []
        self.launches: list[Launch] = []
        self.body: list[Launch] | None = None

    def lower(self, op: Op) -> None:
        """One op."""
        if op.kind == "columns":
            source = self.place[op.inputs[0]]
            self.place[op.name] = Span(source.buffer, source.column + op.integer("start"))
            return
        if op.kind == "select":
            self.body, self.launches = self.launches, []
        kind = "f32" if op.name == self.fused.graph.output else self.kind
        self.buffers[op.name] = Buffer(op.name, FLOAT_BYTES[kind] * op.width, kind, op.width)
        column, produces = 0, list[Produced]()
        for name, width in op.outputs:
            self.place[name] = Span(op.name, column)
            produces.append(Produced(name, column, column + width))
            column += width
        reads = tuple(dict.fromkeys(self.place[name].buffer for name in op.inputs))
        self.launches.append(
            Launch(op.kind, op.name, self._args(op), reads, (op.name,), tuple(produces), "y"),
        )

    def _args(self, op: Op) -> tuple[tuple[str, Arg], ...]:
        caches = caches_of(op, self.serving, self.widths.__getitem__)
        first = len(self.caches)
        self.caches += caches
        held: dict[str, Arg] = {f"x{index}": self.place[name] for index, name in enumerate(op.inputs)}
        held |= {f"w{index}": WeightRef(name) for index, name in enumerate(op.weights)}
        held |= {f"kv{index}": KvRef(first + index) for index in range(len(caches))}
        held |= {"y": Span(op.name), "k": self.widths[op.inputs[0]] if op.inputs else op.width}
        held |= {name: value for name, value in op.attrs if not isinstance(value, str)}
        return tuple((name, held.get(name, 0)) for name in _params(op.kind))
