"""NVIDIA GPUs: every bucket is lowered on its own, since the best kernel for one row is not the best for two thousand.

Steps of at most four rows read weights with `gemv`, which normalises its input on the way; what passes from one product
to the next is bf16 there, all else float32. Larger steps feed tensor cores: inputs of linear layers are bf16, but for
weights of f16 and f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tapeout.compiler.devices import CudaDevice, least, one_an_architecture
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.ir import Op
from tapeout.compiler.kernels.cuda import attention, gemv, linear, small
from tapeout.compiler.kernels.cuda.base import ADD, FLOAT_BYTES, GATED, STORE, Candidate
from tapeout.compiler.layouts import planes_hold
from tapeout.compiler.lowering.base import HIDDEN, Lowering, UnservedError, check_formats, head_norm_eps, packed
from tapeout.compiler.lowering.buckets import HEAD_ROWS, cuda_buckets
from tapeout.compiler.lowering.caches import caches_of
from tapeout.compiler.lowering.choice import Choices, KernelBuilder, Pending
from tapeout.compiler.spec import Serving
from tapeout.compiler.stages import (
    PARTIAL,
    STEP,
    Arg,
    Buffer,
    FusedModel,
    KvRef,
    Produced,
    Program,
    SelectedModel,
    Span,
    StepLayout,
    StepRef,
    WeightRef,
    merge_decisions,
)
from tapeout.runtime.errors import TapeoutError

GEMV_ROWS = (1, 2, 4)


def lower_cuda(
    fused: FusedModel, named: Sequence[CudaDevice], serving: Serving, builder: KernelBuilder
) -> SelectedModel:
    """Lower the program for every bucket, compile what could serve, and keep what suits the first device best.

    Every kernel fits all devices that are ``named``. Raises TapeoutError for what no GPU kernel serves, and when every
    candidate of a problem exceeds a device.
    """
    _refuse_unserved(fused)
    device, devices = least(named), one_an_architecture(named)
    if serving.kv_dtype != "f16":
        raise TapeoutError(f"serving.kv_dtype is {serving.kv_dtype}, but the GPU kernels cache f16; set it to f16")
    context, widths = serving.context_for(fused.logical.max_context), fused.graph.widths
    buckets = cuda_buckets(serving, context)
    shared = _Shared(fused, device, serving, context, _step_layout(buckets, serving, context))
    drafts = [_lower_bucket(shared, phase, rows) for phase, rows in buckets]
    drafts.append(_sample_after_head(shared))
    choices = Choices.make([p for draft in drafts for p in draft.launches], devices, builder)
    quantized = {n: "planes" for n, r in fused.recipes if len(r.shape) == 2 and not FORMATS[r.format].is_float}
    return SelectedModel(
        fused=fused,
        kernels=choices.kernels,
        weights=packed(fused, quantized),
        buffers=tuple(shared.buffers.values()),
        programs=tuple(
            Program(d.phase, d.rows, tuple(choices.launch(p) for p in d.launches), d.capacity) for d in drafts
        ),
        logits=shared.logits,
        caches=tuple(cache for op in fused.graph.ops for cache in caches_of(op, serving, widths.__getitem__)),
        decisions=merge_decisions(choices.decisions),
        step=shared.step,
        multiprocessors=device.sm_count,
    )


def _refuse_unserved(fused: FusedModel) -> None:
    """One sentence for a program with an op or a format that only CPU kernels serve so far."""
    check_formats(fused, "GPU", lambda format: FORMATS[format].is_float or planes_hold(format))
    served = {"embed", "rmsnorm", "linear", "rope", "attention", "gated", "add", "select"}
    for op in fused.graph.ops:
        plain = op.kind in served and not (op.kind == "attention" and op.weights)
        if not plain or (op.kind == "gated" and (op.number("limit") or op.attr("act") not in GATED)):
            raise UnservedError(
                f"{op.name}: no GPU kernel serves this {op.kind} yet; topology.device cpu does, and GPUs serve "
                "the dense families without attention sinks"
            )


@dataclass
class _Draft:
    """A launch list whose kernels are not chosen yet."""

    phase: str
    rows: int
    capacity: int
    launches: list[Pending]


@dataclass
class _Shared:
    """What the lowerings of all buckets share."""

    fused: FusedModel
    device: CudaDevice
    serving: Serving
    context: int
    step: StepLayout
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    logits: str = ""

    def __post_init__(self) -> None:
        self.buffers[STEP] = Buffer(STEP, self.step.nbytes, "scratch", pinned=True, max_rows=1)
        self.buffers[PARTIAL] = Buffer(PARTIAL, 0, "scratch", pinned=True, max_rows=1)

    def partial(self, nbytes: int) -> Span:
        """Parts of attention's results; they are zero between launches, so all layers and lists share their place."""
        held = self.buffers[PARTIAL]
        self.buffers[PARTIAL] = replace(held, per_row=max(held.per_row, nbytes))
        return Span(PARTIAL)


def _step_layout(buckets: Sequence[tuple[str, int]], serving: Serving, context: int) -> StepLayout:
    rows = max(rows for phase, rows in buckets if phase != "head")
    out_rows = max(HEAD_ROWS, *(rows for phase, rows in buckets if phase == "decode"))
    sequences = max(serving.max_sequences, *GEMV_ROWS)
    pages = -(-context // serving.page_tokens)
    fields = (
        ("counts", 16),
        *((name, 4 * rows) for name in ("tokens", "positions", "row_segment")),
        ("out_row", 4 * max(rows, out_rows)),
        *((name, 4 * out_rows) for name in ("temperature", "top_p", "top_k")),
        *((name, 8 * out_rows) for name in ("seed", "sample_position")),
        *((name, 4 * out_rows) for name in ("sampled", "logprob")),
        ("page_table", 4 * sequences * pages),
    )
    return StepLayout(rows, sequences, out_rows, pages, fields)


def _lower_bucket(shared: _Shared, phase: str, rows: int) -> _Draft:
    lowering = _BucketLowering(shared, phase, rows)
    for op in shared.fused.graph.ops:
        lowering.lower(op)
    if phase == "decode":
        lowering.sample(advance=True)
    return _Draft(phase, rows, lowering.rows, lowering.launches)


def _sample_after_head(shared: _Shared) -> _Draft:
    lowering = _BucketLowering(shared, "sample", 1)
    lowering.sample(advance=False)
    return _Draft("sample", 1, 1, lowering.launches)


class _BucketLowering(Lowering):
    """Lowers the program for one bucket.

    ``acts`` are copies that tensor cores read, by value and type. ``normed`` are norms that nothing has computed yet:
    the products that read them do, or `input_of` at the first of these.
    """

    def __init__(self, shared: _Shared, phase: str, rows: int) -> None:
        super().__init__(shared.fused)
        self.shared, self.device, self.phase = shared, shared.device, phase
        self.buffers = shared.buffers
        self.rows = next((m for m in GEMV_ROWS if m >= rows), rows)
        self.is_gemv = phase != "prefill" and rows <= GEMV_ROWS[-1]
        self.count = 2 if phase == "head" else 0
        self.launches: list[Pending] = []
        self.acts: dict[tuple[str, str], Span] = {}
        self.normed: dict[str, Op] = {}
        self.ended = False
        if phase == "head":
            self._skip_body()

    def _skip_body(self) -> None:
        """A head list starts at `select`; what that reads lies in the residual stream."""
        select = next(op for op in self.graph.ops if op.kind == "select")
        before = self.graph.ops[: self.graph.ops.index(select)]
        self.done.update(op.name for op in before)
        self.buffer(HIDDEN, select.width, "f32", pinned=True)
        self.place[select.inputs[0]] = Span(HIDDEN)

    def lower(self, op: Op) -> None:
        """Lower one op, unless the bucket's list has ended before it."""
        if not self.ended:
            super().lower(op)

    def buffer(self, name: str, columns: int, kind: str, *, pinned: bool = False, max_rows: int | None = None) -> Span:
        """A row-major buffer, made if it is new; buckets that hold a value in another type use another name."""
        key = name if kind == "f32" else f"{name}.{kind}"
        self.buffers.setdefault(key, Buffer(key, FLOAT_BYTES[kind] * columns, kind, columns, pinned, max_rows))
        return Span(key)

    def emit(
        self,
        op: str,
        candidates: Sequence[Candidate],
        args: Mapping[str, Arg],
        reads: Sequence[Span],
        writes: Sequence[Span],
        produces: tuple[Produced, ...] = (),
        out: str = "y",
    ) -> None:
        """Append a launch whose kernel is one of ``candidates``."""
        read, written = (tuple(span.buffer for span in spans) for spans in (reads, writes))
        where = f"{self.phase}.{self.rows}"
        self.launches.append(
            Pending(op, where, tuple(candidates), args, read, written, produces, out if produces else "")
        )

    # -- activations

    def act_type(self, op: Op) -> attention.Out:
        """The type in which tensor cores read the input of a linear op."""
        format = self.format(op.weights[0])
        return "f16" if format == "f16" else "f32" if format == "f32" else "bf16"

    def reader_type(self, value: str) -> attention.Out:
        """The type a value is best written in: what its one linear reader wants, else float32."""
        types: set[attention.Out] = {
            self.act_type(op) if op.kind == "linear" else "f32" for op in self.consumers.get(value, [])
        }
        return types.pop() if len(types) == 1 else "f32"

    def input_of(self, op: Op) -> Span:
        """The input of a linear op for tensor cores, normalised or cast now if nothing did yet."""
        value, kind = op.inputs[0], self.act_type(op)
        if (value, kind) in self.acts:
            return self.acts[value, kind]
        if value in self.normed:
            span = self.acts[value, kind] = self._norm(self.normed[value], kind)
            return span
        source = self.place[value]
        if self.buffers[source.buffer].kind == kind:
            return source
        y = self.buffer(f"{value}.cast", self.width(value), kind)
        cast = small.cast(self.width(value), self.stride(source), kind, self.rows)
        self.emit(op.name, [cast], {"x": source, "y": y, "counts": self._counts()}, (source,), (y,))
        self.acts[value, kind] = y
        return y

    def _counts(self) -> StepRef:
        return StepRef("counts")

    # -- one method an op kind

    def _embed(self, op: Op) -> None:
        y = self.place[op.name] = self.buffer(HIDDEN, op.width, "f32", pinned=True)
        weight = op.weights[0]
        vocab = self.slots[weight].shape[0]
        kernel = small.embed(self.format(weight), vocab, op.width, op.number("scale"), self.rows)
        args = {"tokens": StepRef("tokens"), "w": WeightRef(weight), "y": y, "counts": self._counts()}
        self.emit(op.name, [kernel], args, (), (y,), (Produced(op.name, 0, op.width),))

    def _rmsnorm(self, op: Op) -> None:
        readers = self.consumers[op.name]
        kinds = {reader.kind for reader in readers}
        if kinds in ({"rope"}, {"add"}) and len(readers) == 1:
            return
        if op.integer("group") != op.width:
            raise TapeoutError(f"{op.name}: the GPU kernels normalise heads only on the way to a rotation")
        if kinds == {"linear"}:
            self.normed[op.name] = op
        else:
            self.place[op.name] = self._norm(op, "f32")

    def _norm(self, op: Op, kind: str) -> Span:
        x, y = self.place[op.inputs[0]], self.buffer(op.name, op.width, kind)
        kernel = small.rmsnorm(op.width, self.stride(x), op.number("eps"), kind, self.rows, self.count)
        args = {"x": x, "weight": WeightRef(op.weights[0]), "y": y, "counts": self._counts()}
        self.emit(op.name, [kernel], args, (x,), (y,), (Produced(op.name, 0, op.width),))
        return y

    def _keep_norms(self, add: Op) -> None:
        """Before ``add`` changes the residual stream: write out its norms that ops not lowered yet will read."""
        stream = next(name for name in add.inputs if self.streams(name, add))
        for norm in self.consumers[stream]:
            if norm.kind != "rmsnorm" or norm.name in self.place:
                continue
            waiting = [reader for reader in self.consumers[norm.name] if reader.name not in self.done]
            if norm.name in self.normed and not self.is_gemv:
                for reader in waiting:
                    self.input_of(reader)
            elif waiting:
                self.place[norm.name] = self._norm(norm, "f32")
                self.normed.pop(norm.name, None)

    def _linear(self, op: Op) -> None:
        residual = self.residual_of(op)
        if residual is not None:
            self._keep_norms(residual)
        if not self.is_gemv:
            make = partial(linear.candidates, count_index=self.count)
            return self._product(op, self.input_of(op), make, {"counts": self._counts()})
        norm = self.normed.get(op.inputs[0])
        x = self.place[norm.inputs[0] if norm else op.inputs[0]]
        k = self.slots[op.weights[0]].shape[1]
        if (
            self.rows > 1
            and not norm
            and not gemv.holds_activations(self.format(op.weights[0]), k, self.rows, self.device)
        ):
            make = partial(linear.candidates, count_index=self.count)
            return self._product(op, x, make, {"counts": self._counts()})
        eps = norm.number("eps") if norm else 0.0
        make = partial(gemv.candidates, norm=norm is not None, eps=eps)
        return self._product(op, x, make, {"norm": WeightRef(norm.weights[0]) if norm else 0})

    def _product(self, op: Op, x: Span, make: Callable[..., list[Candidate]], more: Mapping[str, Arg]) -> None:
        """A launch of x times the op's weight; ``make`` lists kernels for it, ``more`` are the arguments of its own."""
        weight = op.weights[0]
        y, epilogue, n, produces = self._epilogue(op)
        bias = WeightRef(op.weights[1]) if len(op.weights) > 1 else 0
        found = make(
            self.format(weight),
            n,
            self.slots[weight].shape[1],
            self.rows,
            ldx=self.stride(x),
            ldy=self.stride(y),
            epilogue=epilogue,
            bias=bool(bias),
            x=self.buffers[x.buffer].kind,
            y=self.buffers[y.buffer].kind,
            device=self.device,
        )
        args = {"x": x, "w": WeightRef(weight), "bias": bias, "y": y, **more}
        self.emit(op.name, found, args, (x, y) if epilogue == ADD else (x,), (y,), produces)

    def _epilogue(self, op: Op) -> tuple[Span, int, int, tuple[Produced, ...]]:
        """Where the product goes and what is done to it on the way: (output, epilogue, columns written, values)."""
        gate = self.gate_of(op)
        if gate is not None:
            y = self.place[gate.name] = self.buffer(gate.name, gate.width, self.reader_type(gate.name))
            self.done.add(gate.name)
            return y, GATED[str(gate.attr("act"))], gate.width, (Produced(gate.name, 0, gate.width),)
        residual = self.residual_of(op)
        if residual is not None:
            y = self.place[residual.name] = Span(HIDDEN)
            self.done.add(residual.name)
            return y, ADD, op.width, (Produced(residual.name, 0, op.width),)
        y = self._logits(op) if op.name == self.graph.output else self.store_place(op)
        column, produces = 0, list[Produced]()
        for name, width in op.outputs:
            self.place[name] = Span(y.buffer, y.column + column)
            produces.append(Produced(name, column, column + width))
            column += width
        return y, STORE, op.width, tuple(produces)

    def _logits(self, op: Op) -> Span:
        """Logits pass from a head list to a sample list, so they have one place."""
        self.shared.logits = op.name
        return self.buffer(op.name, op.width, "f32", pinned=True, max_rows=self.shared.step.out_rows)

    def _rope(self, op: Op) -> None:
        readers = self.consumers[op.name]
        if len(readers) != 1 or readers[0].kind != "attention":
            raise TapeoutError(f"{op.name}: the GPU kernels rotate on the way to attention; its one reader must be one")

    def _attention(self, op: Op) -> None:
        taken = _AttentionInput.of(self, op)
        shape = self._attention_shape(op, taken)
        kind = self.reader_type(op.name)
        y = self.place[op.name] = self.buffer(op.name, op.width, kind)
        produces = (Produced(op.name, 0, op.width),)
        rotated: dict[str, Arg] = {
            "qkv": taken.qkv,
            "inv_freq": WeightRef(taken.frequencies),
            "q_norm": WeightRef(taken.q_norm) if taken.q_norm else 0,
            "k_norm": WeightRef(taken.k_norm) if taken.k_norm else 0,
        }
        paged: dict[str, Arg] = {
            "positions": StepRef("positions"),
            "row_segment": StepRef("row_segment"),
            "page_table": StepRef("page_table"),
            "kv": KvRef(op.integer("layer")),
            "counts": self._counts(),
        }
        context = self.shared.context
        if self.phase == "prefill":
            q = self.buffer(f"{op.name}.q", op.width, "f16")
            rope = small.rope_kv(shape, self.rows)
            self.emit(op.name, [rope], {**rotated, **paged, "q_out": q}, (taken.qkv,), (q,))
            found = attention.prefill(shape, self.rows, context, kind)
            self.emit(op.name, found, {**paged, "q": q, "out": y}, (q,), (y,), produces, "out")
            return
        found = attention.decode(shape, self.rows, self.device, context, kind)
        partial = self.shared.partial(attention.partial_bytes(shape, self.rows, self.device))
        args = {**rotated, **paged, "out": y, "partial": partial}
        self.emit(op.name, found, args, (taken.qkv, partial), (y, partial), produces, "out")

    def _attention_shape(self, op: Op, taken: _AttentionInput) -> attention.Attention:
        q_col, k_col, v_col = taken.columns
        return attention.Attention(
            heads=op.integer("heads"),
            kv_heads=op.integer("kv_heads"),
            head_dim=op.integer("head_dim"),
            page_tokens=self.shared.serving.page_tokens,
            max_pages=self.shared.step.max_pages,
            scale=op.number("scale"),
            row=self.stride(taken.qkv),
            q_col=q_col,
            k_col=k_col,
            v_col=v_col,
            window=op.integer("window"),
            factor=taken.factor,
            qk_norm=bool(taken.q_norm),
            eps=taken.eps,
        )

    def _gated(self, op: Op) -> None:
        gate, up = (self.place[name] for name in op.inputs)
        if up != Span(gate.buffer, gate.column + op.width):
            raise TapeoutError(f"{op.name}: the GPU kernel needs gate and up side by side, gate first")
        kind = self.reader_type(op.name)
        y = self.place[op.name] = self.buffer(op.name, op.width, kind)
        kernel = small.gated(str(op.attr("act")), op.width, self.stride(gate), kind, self.rows)
        args = {"x": gate, "y": y, "counts": self._counts()}
        self.emit(op.name, [kernel], args, (gate,), (y,), (Produced(op.name, 0, op.width),))

    def _add(self, op: Op) -> None:
        stream = next((name for name in op.inputs if self.streams(name, op)), None)
        if stream is None:
            raise TapeoutError(f"{op.name}: the GPU kernels add into the residual stream, which neither input is")
        self._keep_norms(op)
        other = next(name for name in op.inputs if name != stream)
        y = self.place[op.name] = Span(HIDDEN)
        norm = self.producer[other] if other not in self.place else None
        x = self.place[norm.inputs[0] if norm else other]
        args: dict[str, Arg] = {"x": x, "y": y, "counts": self._counts()}
        if norm is None:
            kernel = small.add(op.width, self.rows)
        else:
            args["weight"] = WeightRef(norm.weights[0])
            kernel = small.rmsnorm_add(op.width, self.stride(x), norm.number("eps"), self.rows)
        self.emit(op.name, [kernel], args, (x, y), (y,), (Produced(op.name, 0, op.width),))

    def _select(self, op: Op) -> None:
        """A decode step wants the logits of all its rows; a prefill list ends here, and a head list gathers."""
        if self.phase == "prefill":
            self.ended = True
            return
        x = self.place[op.inputs[0]]
        if self.phase == "decode":
            self.place[op.name] = x
            return
        y = self.place[op.name] = self.buffer(op.name, op.width, "f32")
        args = {"x": x, "out_row": StepRef("out_row"), "y": y, "counts": self._counts()}
        kernel = small.gather(op.width, self.rows)
        self.emit(op.name, [kernel], args, (x,), (y,), (Produced(op.name, 0, op.width),))

    def sample(self, *, advance: bool) -> None:
        """Choose a token for every row of logits; after a decode step, make the device ready for the next."""
        vocab = self.fused.logical.vocab_size
        logits = Span(self.shared.logits)
        names = (
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "sample_position",
            "sampled",
            "logprob",
            "tokens",
            "positions",
        )
        args: dict[str, Arg] = {name: StepRef(name) for name in (*names, "counts")}
        kernel = small.sample(vocab, self.rows, advance, self.device.shared_per_block)
        self.emit("sample", [kernel], {**args, "logits": logits}, (logits,), ())


@dataclass(frozen=True)
class _AttentionInput:
    """Where attention finds q, k and v, and how they are normalised and rotated on the way."""

    qkv: Span
    columns: tuple[int, int, int]
    frequencies: str
    factor: float
    q_norm: str
    k_norm: str
    eps: float

    @staticmethod
    def of(lowering: _BucketLowering, op: Op) -> _AttentionInput:
        """Read off the ops before attention. Raises TapeoutError for an order that no GPU kernel serves."""
        rotated = [lowering.producer[name] for name in op.inputs[:2]]
        if len({(rope.kind, rope.weights) for rope in rotated}) != 1 or rotated[0].kind != "rope":
            raise TapeoutError(f"{op.name}: the GPU kernels need q and k rotated with one set of frequencies")
        norms: list[str] = []
        sources: list[str] = []
        before = [lowering.producer[rope.inputs[0]] for rope in rotated]
        for rope, source in zip(rotated, before, strict=True):
            is_norm = source.kind == "rmsnorm"
            norms.append(source.weights[0] if is_norm else "")
            sources.append(source.inputs[0] if is_norm else rope.inputs[0])
        eps = head_norm_eps(op, [source for source in before if source.kind == "rmsnorm"])
        spans = [lowering.place[name] for name in (*sources, op.inputs[2])]
        if len({span.buffer for span in spans}) != 1 or bool(norms[0]) != bool(norms[1]):
            raise TapeoutError(
                f"{op.name}: the GPU kernels need q, k and v in one buffer, both or none of q and k normed"
            )
        columns = (spans[0].column, spans[1].column, spans[2].column)
        factor = rotated[0].number("factor")
        return _AttentionInput(Span(spans[0].buffer), columns, rotated[0].weights[0], factor, norms[0], norms[1], eps)
