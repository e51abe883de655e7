"""The logical program of a model: a flat list of ops over named values, for one device and without numbers' formats.

Every value is a float32 matrix [rows, width] where rows are the tokens of a step; an op writes exactly one value, which
bears the op's name. Names are those of the reference implementation's modules, so that `verify` can line both up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tapeout.runtime.errors import TapeoutError

Attr = int | float | str


@dataclass(frozen=True)
class Weight:
    """A weight slot: filled exactly once by ingestion. ``axes`` names each dimension for partitioning."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class OpKind:
    """What is true of every op of a kind: how many inputs and weights it has, and which attributes."""

    inputs: int
    weights: tuple[int, int]
    attrs: frozenset[str]


def _kind(inputs: int, weights: tuple[int, int] = (0, 0), *attrs: str) -> OpKind:
    return OpKind(inputs, weights, frozenset(attrs))


OP_KINDS: Mapping[str, OpKind] = {
    # value = table[token] * scale
    "embed": _kind(0, (1, 1), "scale"),
    # x / sqrt(mean(x^2) + eps) * w over groups of `group` columns (the width, or the head size)
    "rmsnorm": _kind(1, (1, 1), "eps", "group"),
    # x @ w.T (+ bias)
    "linear": _kind(1, (1, 2)),
    # rotary embedding of halves; the weight holds the inverse frequencies, cos and sin are multiplied by `factor`
    "rope": _kind(1, (1, 1), "head_dim", "factor"),
    # softmax(q k^T * scale + causal mask) v over the sequence's cache; window 0 sees everything
    "attention": _kind(3, (0, 0), "layer", "heads", "kv_heads", "head_dim", "scale", "window"),
    # act(gate) * up, act in {silu, gelu_tanh}
    "gated": _kind(2, (0, 0), "act"),
    "add": _kind(2),
    # the rows whose logits are wanted
    "select": _kind(1),
}


@dataclass(frozen=True)
class Op:
    """One op: ``kind`` of OP_KINDS, named inputs and weights, scalar attributes, output of ``width`` columns.

    ``fuse`` names the fused weight this op may become a part of; ``parts`` lists the values a fused op writes.
    """

    kind: str
    name: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    width: int
    attrs: tuple[tuple[str, Attr], ...] = ()
    fuse: str = ""
    parts: tuple[tuple[str, int], ...] = ()

    def attr(self, key: str) -> Attr:
        """One attribute by name."""
        return dict(self.attrs)[key]

    def integer(self, key: str) -> int:
        """One attribute that is an integer."""
        value = self.attr(key)
        assert isinstance(value, int), (self.name, key, value)
        return value

    def number(self, key: str) -> float:
        """One attribute as a float."""
        return float(self.attr(key))

    @property
    def outputs(self) -> tuple[tuple[str, int], ...]:
        """The values this op writes, with their widths: itself, or its parts in declared order."""
        return self.parts or ((self.name, self.width),)


@dataclass(frozen=True)
class Graph:
    """A whole program. ``output`` names the logits."""

    ops: tuple[Op, ...]
    weights: tuple[Weight, ...]
    output: str

    def op(self, name: str) -> Op:
        """The op that bears a name."""
        return self.by_name[name]

    @property
    def by_name(self) -> Mapping[str, Op]:
        """All ops by name."""
        return {op.name: op for op in self.ops}

    @property
    def slots(self) -> Mapping[str, Weight]:
        """All weight slots by name."""
        return {weight.name: weight for weight in self.weights}

    def consumers(self) -> dict[str, list[Op]]:
        """For every value, the ops that read it, in program order."""
        readers: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in op.inputs:
                readers.setdefault(name, []).append(op)
        return readers


def check_graph(graph: Graph) -> None:
    """Assert that values are defined once before use, kinds and attributes are known, and every weight slot is used."""
    defined: set[str] = set()
    used: set[str] = set()
    slots = graph.slots
    assert len(slots) == len(graph.weights), "two weight slots share a name"
    for op in graph.ops:
        kind = OP_KINDS.get(op.kind)
        assert kind is not None, f"{op.name}: unknown op kind {op.kind}"
        assert len(op.inputs) == kind.inputs, f"{op.name}: {op.kind} takes {kind.inputs} inputs"
        assert kind.weights[0] <= len(op.weights) <= kind.weights[1], (
            f"{op.name}: {op.kind} takes {kind.weights} weights"
        )
        assert {key for key, _ in op.attrs} == kind.attrs, f"{op.name}: attributes are {sorted(kind.attrs)}"
        missing = [name for name in op.inputs if name not in defined]
        assert not missing, f"{op.name} reads {missing} before it is written"
        unknown = [name for name in op.weights if name not in slots]
        assert not unknown, f"{op.name} uses unknown weights {unknown}"
        for name, _ in op.outputs:
            assert name not in defined, f"{name} is written twice"
            defined.add(name)
        used.update(op.weights)
    assert graph.output in defined, f"the output {graph.output} is never written"
    unused = sorted(set(slots) - used)
    assert not unused, f"weights that no op uses: {unused}"


@dataclass
class Builder:
    """Collects ops and weight slots while a family writes down its forward pass."""

    ops: list[Op] = field(default_factory=list[Op])
    weights: dict[str, Weight] = field(default_factory=dict[str, Weight])
    widths: dict[str, int] = field(default_factory=dict[str, int])

    def weight(self, name: str, shape: Iterable[int], axes: Iterable[str]) -> str:
        """Declare a weight slot; declaring the same slot twice with one shape shares it (tied weights)."""
        slot = Weight(name, tuple(shape), tuple(axes))
        known = self.weights.setdefault(name, slot)
        if known.shape != slot.shape:
            raise TapeoutError(f"{name} is used with shapes {list(known.shape)} and {list(slot.shape)}")
        return name

    def _op(self, kind: str, name: str, inputs: tuple[str, ...], weights: tuple[str, ...], width: int, fuse: str = "",
            **attrs: Attr) -> str:  # fmt: skip
        self.ops.append(Op(kind, name, inputs, weights, width, tuple(sorted(attrs.items())), fuse))
        self.widths[name] = width
        return name

    def embed(self, name: str, vocab: int, hidden: int, scale: float = 1.0) -> str:
        """Token embedding, [rows, hidden]."""
        table = self.weight(name, (vocab, hidden), ("vocab", "hidden"))
        return self._op("embed", name, (), (table,), hidden, scale=scale)

    def rmsnorm(self, name: str, x: str, eps: float, head_dim: int = 0) -> str:
        """RMSNorm over the whole width, or over each head of ``head_dim`` columns with one shared weight."""
        group = head_dim or self.widths[x]
        weight = self.weight(name, (group,), ("head_dim" if head_dim else "hidden",))
        return self._op("rmsnorm", name, (x,), (weight,), self.widths[x], eps=eps, group=group)

    def linear(self, name: str, x: str, width: int, axes: tuple[str, str], *, bias: bool = False, fuse: str = "",
               weight: str = "") -> str:  # fmt: skip
        """x @ w.T with w [width, in]; ``axes`` are those of the weight; ``weight`` shares another op's slot."""
        slots = [self.weight(weight or name, (width, self.widths[x]), axes)]
        if bias:
            slots.append(self.weight(f"{name}.bias", (width,), axes[:1]))
        return self._op("linear", name, (x,), tuple(slots), width, fuse)

    def rope(self, name: str, x: str, frequencies: str, head_dim: int, factor: float) -> str:
        """Rotary embedding in halves layout; ``frequencies`` names the slot of [head_dim / 2] inverse frequencies."""
        slot = self.weight(frequencies, (head_dim // 2,), ("head_dim",))
        return self._op("rope", name, (x,), (slot,), self.widths[x], head_dim=head_dim, factor=factor)

    def attention(
        self, name: str, qkv: tuple[str, str, str], *, layer: int, head_dim: int, scale: float, window: int
    ) -> str:
        """Causal grouped-query attention over the cache of ``layer``; head counts follow from the widths."""
        heads, kv_heads = self.widths[qkv[0]] // head_dim, self.widths[qkv[1]] // head_dim
        return self._op("attention", name, qkv, (), heads * head_dim, layer=layer, heads=heads, kv_heads=kv_heads,
                        head_dim=head_dim, scale=scale, window=window)  # fmt: skip

    def gated(self, name: str, gate: str, up: str, act: str) -> str:
        """act(gate) * up."""
        return self._op("gated", name, (gate, up), (), self.widths[gate], act=act)

    def add(self, name: str, a: str, b: str) -> str:
        """a + b."""
        return self._op("add", name, (a, b), (), self.widths[a])

    def select(self, name: str, x: str) -> str:
        """The rows of x whose logits are wanted."""
        return self._op("select", name, (x,), (), self.widths[x])

    def graph(self, output: str) -> Graph:
        """The finished program."""
        return Graph(tuple(self.ops), tuple(self.weights.values()), output)
