"""The CPU: every op becomes a launch of a C kernel that serves its format, with layouts, epilogues and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tapeout.compiler.devices import CpuDevice
from tapeout.compiler.ir import Op
from tapeout.compiler.kernels import embed, linear, simple
from tapeout.compiler.kernels.base import x8_bytes
from tapeout.compiler.layouts import TILE_ROWS, packed_bytes, tile16_holds
from tapeout.compiler.lowering import collectives, compressed, experts, latent
from tapeout.compiler.lowering.base import (
    HIDDEN,
    SPLIT_ROWS,
    Lowering,
    check_formats,
    head_norm_eps,
    packed,
)
from tapeout.compiler.lowering.buckets import cpu_buckets
from tapeout.compiler.lowering.caches import caches_of
from tapeout.compiler.spec import Serving
from tapeout.compiler.stages import (
    Arg,
    Buffer,
    Cache,
    Capacity,
    Decision,
    FusedModel,
    KernelEntry,
    KvRef,
    Launch,
    Produced,
    Program,
    SelectedModel,
    SizeOf,
    Span,
    WeightRef,
    merge_decisions,
)
from tapeout.runtime.errors import TapeoutError

HANDLERS: Mapping[str, Callable[[CpuLowering, Op], None]] = {
    **experts.HANDLERS,
    **latent.HANDLERS,
    **compressed.HANDLERS,
    **collectives.HANDLERS,
}


def lower_cpu(fused: FusedModel, device: CpuDevice, serving: Serving) -> SelectedModel:
    """Lower every op to a kernel that serves its format, folding in residual adds, gates, norms and rotations."""
    check_formats(fused, "CPU", tile16_holds)
    lowering = CpuLowering(fused, device, serving)
    for op in fused.graph.ops:
        lowering.lower(op)
    return lowering.finish()


class CpuLowering(Lowering):
    """One list of launches for the body and one for the head serve every bucket.

    Kinds of ops that have a file of their own are in ``HANDLERS``; the others are methods here.
    """

    def __init__(self, fused: FusedModel, device: CpuDevice, serving: Serving) -> None:
        super().__init__(fused)
        self.device, self.serving = device, serving
        self.quantized: dict[str, str] = {}
        self.kernels: dict[str, KernelEntry] = {}
        self.launches: list[Launch] = []
        self.body: list[Launch] | None = None
        self.caches: list[Cache] = []

    def finish(self) -> SelectedModel:
        """The lowered model, after every op."""
        body = self.body
        assert body is not None, "the program selects no rows"
        output = self.place[self.graph.output]
        context = self.serving.context_for(self.fused.logical.max_context)
        return SelectedModel(
            fused=self.fused,
            kernels=tuple(self.kernels[name] for name in sorted(self.kernels)),
            weights=packed(self.fused, {name: linear.LAYOUT for name, r in self.recipes.items() if len(r.shape) == 2}),
            buffers=tuple(self.buffers.values()),
            programs=tuple(
                Program(phase, rows, tuple(self.launches if phase == "head" else body))
                for phase, rows in cpu_buckets(self.serving, context)
            ),
            logits=output.buffer,
            caches=tuple(self.caches),
            decisions=merge_decisions(self.decisions),
        )

    def x8_buffer(self, value: str, columns: int) -> tuple[Span, Capacity]:
        """A buffer for a value as quantized activations, and its capacity in rows."""
        terms, name = self.terms(value), f"{value}.x8"
        self.buffers[name] = Buffer(name, x8_bytes(columns) * terms, "x8", columns, terms=terms)
        self.quantized[value] = name
        return Span(name), Capacity(terms)

    def terms(self, value: str) -> int:
        """How many 8-bit terms hold a quantized value."""
        return 2 if any(self._is_sensitive(reader) for reader in self.consumers[value]) else 1

    def _is_sensitive(self, op: Op) -> bool:
        """Whether rounding the op's input to 8 bits shows in the logits: they are its output, or attention weighs it.

        Measured (docs/measurements): these inputs make up about half of the divergence of SmolLM2 and Gemma 3, and read
        a sixth of a layer's weights.
        """
        gathered = [reader.name for reader in self.consumers.get(op.name, []) if reader.kind == "all_gather"]
        if self.graph.output in (op.name, *gathered):
            return True
        return self.leads_to_attention(op)

    def lower(self, op: Op) -> None:
        """See Lowering."""
        handler = HANDLERS.get(op.kind)
        if handler is None:
            super().lower(op)
        elif op.name not in self.done:
            handler(self, op)
            self.done.add(op.name)

    def caches_for(self, op: Op) -> tuple[KvRef, ...]:
        """New caches of the KV pool: those of an op."""
        first = len(self.caches)
        self.caches += caches_of(op, self.serving, self.width)
        return tuple(KvRef(index) for index in range(first, len(self.caches)))

    def emit(
        self,
        kernel: KernelEntry,
        op: Op,
        args: tuple[Arg, ...],
        reads: tuple[Span, ...],
        writes: tuple[Span, ...],
        produces: tuple[Produced, ...] = (),
    ) -> None:
        """One launch more: arguments in the kernel's order, and the buffers it reads and writes, which place them."""
        self.kernels[kernel.name] = kernel
        named = tuple(zip(kernel.params, args, strict=True))
        read, written = (tuple(span.buffer for span in spans) for spans in (reads, writes))
        self.launches.append(Launch(kernel.name, op.name, named, read, written, produces, "y" if produces else ""))

    def x8(self, value: str, op: Op) -> Span:
        """The value as quantized activations, quantizing it now if nothing did yet."""
        if value not in self.quantized:
            source, columns = self.place[value], self.width(value)
            target, capacity = self.x8_buffer(value, columns)
            args = (source, self.stride(source), target, columns, capacity, capacity.terms)
            self.emit(simple.QUANTIZE_X8, op, args, (source,), (target,))
        return Span(self.quantized[value])

    # -- one method an op kind

    def _embed(self, op: Op) -> None:
        y = self.f32_buffer(HIDDEN, op.width, pinned=True)
        kernel = embed.kernel(self.format(op.weights[0]))
        args = (WeightRef(op.weights[0]), y, op.width, op.number("scale"))
        self.emit(kernel, op, args, (), (y,), (Produced(op.name, 0, op.width),))
        self.place[op.name] = y

    def _rmsnorm(self, op: Op) -> None:
        readers = self.consumers[op.name]
        if any(reader.kind == "rope" for reader in readers):
            return self._absorbed(op, readers, "rope")
        if op.integer("group") != op.width:
            raise TapeoutError(f"{op.name}: the CPU kernels normalise heads only on the way to a rotation")
        if all(reader.kind == "add" for reader in readers):
            return self._absorbed(op, readers, "add")
        x, weight, eps = self.place[op.inputs[0]], WeightRef(op.weights[0]), op.number("eps")
        quantized = [reader for reader in readers if reader.weights and linear.takes_x8(self.format(reader.weights[0]))]
        produces = (Produced(op.name, 0, op.width),)
        if quantized:
            y, capacity = self.x8_buffer(op.name, op.width)
            args = (x, self.stride(x), weight, y, op.width, eps, capacity, capacity.terms)
            self.emit(simple.RMSNORM_X8, op, args, (x,), (y,), produces)
        if len(quantized) < len(readers):
            y = self.f32_buffer(op.name, op.width)
            self.emit(simple.RMSNORM_F32, op, (x, self.stride(x), weight, y, op.width, eps), (x,), (y,), produces)
            self.place[op.name] = y
        return None

    def _absorbed(self, op: Op, readers: list[Op], kind: str) -> None:
        """Check that the op's only reader will fold it in; it gets no launch of its own."""
        if len(readers) != 1 or readers[0].kind != kind:
            raise TapeoutError(
                f"{op.name}: no CPU kernel computes this {op.kind} on its own; its one reader must be a {kind}"
            )

    def _linear(self, op: Op) -> None:
        weight = op.weights[0]
        format = self.format(weight)
        kernel = linear.kernel(format)
        k = self.slots[weight].shape[1]
        x = self.x8(op.inputs[0], op) if linear.takes_x8(format) else self.place[op.inputs[0]]
        y, epilogue, n, produces = self._epilogue(op)
        bias: Arg = WeightRef(op.weights[1]) if len(op.weights) > 1 else 0
        terms = self.buffers[x.buffer].terms
        args = (x, WeightRef(weight), y, n, k, Capacity(terms), self.stride(y), epilogue, bias, terms)
        reads = (x, y) if epilogue == linear.ADD else (x,)
        self.emit(kernel, op, args, reads, (y,), produces)
        self._record(op, kernel.name, format, k)
        if terms > 1:
            self.record_terms(op)

    def _epilogue(self, op: Op) -> tuple[Span, int, int, tuple[Produced, ...]]:
        """Where the product goes and what is done to it on the way: (output, epilogue, rows of the weight, values)."""
        gate = self.gate_of(op)
        if gate is not None and gate.width % TILE_ROWS == 0:
            y = self.place[gate.name] = self.f32_buffer(gate.name, gate.width)
            self.done.add(gate.name)
            return y, linear.GATED[str(gate.attr("act"))], gate.width, (Produced(gate.name, 0, gate.width),)
        residual = self.residual_of(op)
        if residual is not None:
            y = self.place[residual.name] = Span(HIDDEN)
            self.done.add(residual.name)
            return y, linear.ADD, op.width, (Produced(residual.name, 0, op.width),)
        y = self.store_place(op)
        column, produces = 0, list[Produced]()
        for name, width in op.outputs:
            self.place[name] = Span(y.buffer, y.column + column)
            produces.append(Produced(name, column, column + width))
            column += width
        return y, linear.STORE, op.width, tuple(produces)

    def _record(self, op: Op, chosen: str, format: str, k: int) -> None:
        n, rows = op.width, 1
        times = {
            name: linear.cost(name, n, k, rows).seconds(self.device) for name in dict.fromkeys((format, "bf16", "f32"))
        }
        best = times[format]
        others = tuple(
            (f"linear_{name}", f"weights dequantized at compile time would be read in {time / best:.1f} times the time")
            for name, time in times.items()
            if name != format
        )
        evidence = (("decode_us", round(best * 1e6, 2)), ("bytes", packed_bytes((n, k), format, linear.LAYOUT)))
        self.decisions.append(
            Decision(
                "select_kernels",
                op.name,
                chosen,
                f"serves {format} as stored, layout {linear.LAYOUT}",
                others,
                evidence,
            )
        )

    def record_terms(self, op: Op) -> None:
        """Record why an op's input has two 8-bit terms."""
        reason = "rounding this input to 8 bits shows in the logits; a decode step reads the weight once either way"
        why = "of all 8-bit inputs, those of the head and of q, k and v make up about half of the divergence"
        other = ("one 8-bit term", why)
        self.decisions.append(Decision("select_kernels", f"{op.name} activations", "two 8-bit terms", reason, (other,)))

    def _rope(self, op: Op) -> None:
        self._absorbed(op, self.consumers[op.name], "attention")
        table = self._table(op)
        if table.buffer not in self.buffers:
            y = self.f32_buffer(table.buffer, op.integer("head_dim"))
            args = (WeightRef(op.weights[0]), y, op.integer("head_dim"), op.number("factor"))
            self.emit(simple.ROPE_TABLE, op, args, (), (y,))

    def _table(self, rope: Op) -> Span:
        return Span(f"{rope.weights[0]}.table")

    def _attention(self, op: Op) -> None:
        rotated = [self.producer[name] for name in op.inputs[:2]]
        if any(rope.kind != "rope" for rope in rotated) or len({rope.weights for rope in rotated}) != 1:
            raise TapeoutError(f"{op.name}: the CPU kernel needs q and k rotated with one set of frequencies")
        (q, q_norm), (k, k_norm) = (self._before_rotation(rope) for rope in rotated)
        before = (self.producer[rope.inputs[0]] for rope in rotated)
        eps = head_norm_eps(op, [source for source in before if source.kind == "rmsnorm"])
        v, table = self.place[op.inputs[2]], self._table(rotated[0])
        dtype, (kv,) = self.serving.kv_dtype, self.caches_for(op)
        heads, kv_heads, head_dim = op.integer("heads"), op.integer("kv_heads"), op.integer("head_dim")
        shape = (heads, kv_heads, head_dim, self.serving.page_tokens)
        write = (q, self.stride(q), k, self.stride(k), v, self.stride(v), table, kv, *shape, q_norm, k_norm, eps)
        self.emit(simple.rope_kv(dtype), op, write, (q, k, v, table), (q,))
        y = self.place[op.name] = self.f32_buffer(op.name, op.width)
        split = Span(f"{op.name}.split")
        size = simple.attention_split_bytes(1, heads, head_dim)
        self.buffers[split.buffer] = Buffer(split.buffer, size, "scratch", max_rows=SPLIT_ROWS)
        read = (
            q,
            self.stride(q),
            y,
            kv,
            *shape,
            op.number("scale"),
            op.integer("window"),
            split,
            SizeOf(split.buffer),
        )
        sinks: Arg = WeightRef(op.weights[0]) if op.weights else 0
        self.emit(simple.attention(dtype), op, (*read, sinks), (q,), (y, split))
        self.emit(simple.ATTENTION_COMBINE, op, read, (y, split), (y,), (Produced(op.name, 0, op.width),))

    def _before_rotation(self, rope: Op) -> tuple[Span, Arg]:
        """Where the unrotated value lies, and the weight of a head norm to apply first."""
        source = self.producer[rope.inputs[0]]
        if source.kind == "rmsnorm":
            return self.place[source.inputs[0]], WeightRef(source.weights[0])
        return self.place[rope.inputs[0]], 0

    def _gated(self, op: Op) -> None:
        gate, up = (self.place[name] for name in op.inputs)
        if up != Span(gate.buffer, gate.column + op.width):
            raise TapeoutError(f"{op.name}: the CPU kernel needs gate and up side by side, gate first")
        y = self.place[op.name] = self.f32_buffer(op.name, op.width)
        kernel = simple.GATED[str(op.attr("act"))]
        args = (gate, self.stride(gate), y, op.width, op.number("limit"), 1)
        self.emit(kernel, op, args, (gate,), (y,), (Produced(op.name, 0, op.width),))

    def _add(self, op: Op) -> None:
        stream = next((name for name in op.inputs if self.streams(name, op)), None)
        if stream is None:
            return self._sum(op)
        other = next(name for name in op.inputs if name != stream)
        y = self.place[op.name] = Span(HIDDEN)
        produces = (Produced(op.name, 0, op.width),)
        norm = self.producer[other]
        if norm.kind == "rmsnorm" and other not in self.place:
            x = self.place[norm.inputs[0]]
            args = (x, self.stride(x), WeightRef(norm.weights[0]), y, op.width, norm.number("eps"))
            return self.emit(simple.RMSNORM_ADD, op, args, (x, y), (y,), produces)
        return self.emit(simple.ADD_F32, op, (self.place[other], y, op.width), (self.place[other], y), (y,), produces)

    def _sum(self, op: Op) -> None:
        """Into the buffer of an input that nothing else reads."""
        owned = next((n for n in op.inputs if self.place[n] == Span(n) and len(self.consumers[n]) == 1), None)
        if owned is None:
            raise TapeoutError(
                f"{op.name}: the CPU kernels add into the residual stream or into a value that nothing else reads, and "
                "neither input is one"
            )
        other, y = (self.place[name] for name in sorted(op.inputs, key=lambda name: name == owned))
        self.place[op.name] = y
        self.emit(simple.ADD_F32, op, (other, y, op.width), (other, y), (y,), (Produced(op.name, 0, op.width),))

    def _select(self, op: Op) -> None:
        """Everything from here on works on the selected rows, in a launch list of its own."""
        self.body, self.launches = self.launches, []
        x, y = self.place[op.inputs[0]], self.f32_buffer(op.name, op.width)
        self.emit(simple.GATHER_F32, op, (x, y, op.width), (x,), (y,), (Produced(op.name, 0, op.width),))
        self.place[op.name] = y
