"""What every lowering needs: where values lie, and which neighbours of an op its launch may absorb."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.ir import Op
from tapeout.compiler.layouts import packed_bytes
from tapeout.compiler.recipes import Pack
from tapeout.compiler.stages import Buffer, Decision, FusedModel, PackedWeight, Span
from tapeout.runtime.errors import TapeoutError

HIDDEN = "hidden"
SPLIT_ROWS = 8  # steps of more rows keep all threads busy without splitting a row over its keys
_ATTENDS = frozenset(("rope", "attention", "latent_attention", "sparse_latent_attention", "index_select",
                      "window_attention", "compressed_attention", "sparse_compressed_attention",
                      "select_entries"))  # fmt: skip
_PASSES_ON = frozenset(("rmsnorm", "layernorm", "unit_norm", "columns", "rotate", "head_linear", "compress"))


def packed(fused: FusedModel, layouts: dict[str, str]) -> tuple[PackedWeight, ...]:
    """Every weight in its layout (``raw`` where none is given); vectors last, so that padding to pages lies before."""
    weights: list[PackedWeight] = []
    slots = fused.graph.slots
    further = [dict(recipes) for recipes in fused.ranks[1:]]
    for name, recipe in fused.recipes:
        layout = layouts.get(name, "raw")
        nbytes = packed_bytes(recipe.shape, recipe.format, layout)
        others = tuple(Pack(recipes[name], layout) for recipes in further)
        weights.append(PackedWeight(name, Pack(recipe, layout), slots[name].axes, layout, nbytes, others))
    return tuple(sorted(weights, key=lambda weight: len(weight.recipe.shape) == 1))


class UnservedError(TapeoutError):
    """No kernel of the target serves an op or a number format of the program."""


def check_formats(fused: FusedModel, target: str, holds: Callable[[str], bool]) -> None:
    """Raises UnservedError naming the first matrix whose format no kernel of the target (CPU or GPU) reads."""
    for name, recipe in fused.recipes:
        if len(recipe.shape) == 2 and not holds(recipe.format):
            served = ", ".join(known for known in FORMATS if holds(known))
            raise UnservedError(
                f"{name}: no {target} kernel serves {recipe.format}; quantization.default or a rule can convert it, "
                f"with allow_requantize true, best to q8_0; those that it could be are {served}"
            )


def head_norm_eps(attention: Op, norms: Iterable[Op]) -> float:
    """The eps of the norms on q and k, 0 without any. Raises TapeoutError where they differ: a kernel takes one."""
    found = {norm.number("eps") for norm in norms}
    if len(found) > 1:
        low, high = min(found), max(found)
        raise TapeoutError(
            f"{attention.name}: q and k are normalised with eps {low} and {high}; kernels take one for both"
        )
    return found.pop() if found else 0.0


class Lowering:
    """Walks the program once. ``place`` says where each value lies; absorbed values get no launch of their own.

    ``done`` names the ops that were lowered or absorbed.
    """

    def __init__(self, fused: FusedModel) -> None:
        self.graph, self.fused = fused.graph, fused
        self.recipes, self.slots = dict(fused.recipes), fused.graph.slots
        self.consumers = fused.graph.consumers()
        self.producer = {name: op for op in fused.graph.ops for name, _ in op.outputs}
        self.place: dict[str, Span] = {}
        self.buffers: dict[str, Buffer] = {}
        self.done: set[str] = set()
        self.decisions: list[Decision] = []

    def lower(self, op: Op) -> None:
        """Lower one op unless a launch before it did."""
        if op.name not in self.done:
            getattr(self, f"_{op.kind}")(op)
            self.done.add(op.name)

    def f32_buffer(self, name: str, columns: int, *, pinned: bool = False) -> Span:
        """A float32 buffer, made if it is new."""
        self.buffers.setdefault(name, Buffer(name, 4 * columns, "f32", columns, pinned))
        return Span(name)

    def stride(self, span: Span) -> int:
        """Columns of the buffer that a span lies in."""
        return self.buffers[span.buffer].columns

    def format(self, weight: str) -> str:
        """Number format of a weight."""
        return self.recipes[weight].format

    def width(self, value: str) -> int:
        """Columns of a value."""
        return dict(self.producer[value].outputs)[value]

    def store_place(self, op: Op) -> Span:
        """A fuse group shares one buffer, whether or not it is one matrix; each part has its declared columns."""
        if not op.fuse:
            return self.f32_buffer(op.name, op.width)
        group = [part for part in self.fused.sharded.graph.ops if part.fuse == op.fuse]
        column = 0
        for part in group:
            if part.name == op.outputs[0][0]:
                break
            column += part.width
        return Span(self.f32_buffer(op.fuse, sum(part.width for part in group)).buffer, column)

    def gate_of(self, op: Op) -> Op | None:
        """The gated op that may ride on this product: gate and up are one matrix without bias or limit, gate first."""
        if len(op.parts) != 2 or len(op.weights) > 1 or op.parts[0][1] != op.parts[1][1]:
            return None
        readers = [self.consumers[name] for name, _ in op.parts]
        if any(len(reader) != 1 or reader[0].kind != "gated" for reader in readers):
            return None
        gate = readers[0][0]
        if gate is not readers[1][0] or gate.number("limit"):
            return None
        return gate if gate.inputs == (op.parts[0][0], op.parts[1][0]) else None

    def residual_of(self, op: Op) -> Op | None:
        """The add into the residual stream that may ride on this product."""
        readers = self.consumers.get(op.name, [])
        if op.parts or len(readers) != 1 or readers[0].kind != "add":
            return None
        other = next((name for name in readers[0].inputs if name != op.name), None)
        return readers[0] if other is not None and self.streams(other, readers[0]) else None

    def streams(self, value: str, add: Op) -> bool:
        """Whether a value lies in the residual stream and everything else that reads it is lowered already."""
        others = (reader for reader in self.consumers[value] if reader is not add)
        return self.place.get(value) == Span(HIDDEN) and all(reader.name in self.done for reader in others)

    def leads_to_attention(self, op: Op) -> bool:
        """Whether attention weighs what the op writes, as queries or keys: norms, cuts, rotations may lie between."""
        readers = [reader for name, _ in op.outputs for reader in self.consumers.get(name, [])]
        return any(
            reader.kind in _ATTENDS or (reader.kind in _PASSES_ON and self.leads_to_attention(reader))
            for reader in readers
        )
