"""The logical program of a model: a flat list of ops over named values, for one device and without numbers' formats.

Every value is a float32 matrix [rows, width] where rows are the tokens of a step; an op writes exactly one value, which
bears the op's name. Names are those of the reference implementation's modules, so that `verify` can line both up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
    # (x - mean) / sqrt(var + eps) * w + bias
    "layernorm": _kind(1, (2, 2), "eps"),
    # x @ w.T (+ bias)
    "linear": _kind(1, (1, 2)),
    # the same for each of `heads` equal groups of columns, with as many equal groups of rows of w [heads * out, in]
    "head_linear": _kind(1, (1, 1), "heads"),
    # columns `start` on of every `period` columns: a view, as many of each as the width says
    "columns": _kind(1, (0, 0), "period", "start"),
    # rotary embedding of halves; the weight holds the inverse frequencies, cos and sin are multiplied by `factor`
    "rope": _kind(1, (1, 1), "head_dim", "factor"),
    # rotary embedding of `rotated` columns from `start` on in every `period`, in place; adjacent pairs (`pairs` 1) or
    # halves (0), by the angle of the row's position times `sign`
    "rotate": _kind(1, (1, 1), "period", "start", "rotated", "pairs", "sign", "factor"),
    # softmax(q k^T * scale + causal mask) v over the sequence's cache; window 0 sees everything; the weight holds one
    # more logit a head (a sink), which has no value
    "attention": _kind(3, (0, 1), "layer", "heads", "kv_heads", "head_dim", "scale", "window"),
    # the same with one key [latent | rope] for all heads, whose latent part is the value (multi-head latent attention,
    # absorbed): inputs q of the latent [rows, heads * latent], q of the rope part, and this row's latent and rope key
    "latent_attention": _kind(4, (0, 0), "layer", "heads", "latent", "rope", "scale"),
    # over selected positions only: the fifth input comes from an index_select
    "sparse_latent_attention": _kind(5, (0, 0), "layer", "heads", "latent", "rope", "scale"),
    # the top_k positions by sum over heads of w * relu(q k^T) * scale, over cached index keys: inputs q, k, w
    "index_select": _kind(3, (0, 0), "layer", "heads", "head_dim", "top_k", "scale"),
    # act(gate) * up, act in {silu, gelu_tanh, swiglu_oai}; limit L > 0: gate <= L, -L <= up <= L before it
    "gated": _kind(2, (0, 0), "act", "limit"),
    # [rows, 2 * top_k]: the ids of the chosen experts, then their weights; the weight is a bias that only chooses
    "route": _kind(1, (0, 1), "top_k", "score", "groups", "top_groups", "group_score", "normalize", "scale"),
    # x through the chosen experts: [rows, top_k * out] with w [experts * out, in] (+ bias [experts * out])
    "expert_linear": _kind(2, (1, 2), "experts", "top_k"),
    # sum over the chosen experts of weight * (h of the expert @ w.T (+ bias)): h is [rows, top_k * in]
    "expert_sum": _kind(2, (1, 2), "experts", "top_k"),
    "add": _kind(2),
    # between the ranks of a split model: the sum of what each has, or the columns of all side by side
    "all_reduce": _kind(1),
    "all_gather": _kind(1),
    # the rows whose logits are wanted
    "select": _kind(1),
    # x `times` times side by side: the streams of a residual with hyper-connections, all equal at the start
    "repeat": _kind(1, (0, 0), "times"),
    # x / sqrt(mean(x^2) + eps) over groups of `group` columns
    "unit_norm": _kind(1, (0, 0), "eps", "group"),
    # what mixes n streams into a block and out of it, [pre n | post n | mix n x n] of each row, or pre alone without
    # Sinkhorn `iterations`: inputs the streams and their product with fn, weights base and scale
    "hyper_weights": _kind(2, (2, 2), "streams", "iterations", "norm_eps", "eps"),
    # the block's input: sum of pre[j] * stream j; inputs the streams and their hyper_weights
    "hyper_mix": _kind(2, (0, 0), "streams"),
    # stream i becomes post[i] * y + sum of mix[j, i] * stream j: inputs the streams, their hyper_weights, the block's y
    "hyper_join": _kind(3, (0, 0), "streams"),
    # every `ratio` tokens, a window, become one cached entry: the sum of c * softmax(g + ape), by channel, normed and
    # rotated; its value is the entry in the row that ends a window, else 0. With `overlap` c and g are [a | b], and the
    # sum is over a of the window before and b of this one. Inputs c, g; weights ape, norm, inverse frequencies
    "compress": _kind(2, (3, 3), "ratio", "overlap", "rotated", "eps"),
    # the top_k entries by sum over heads of w * relu(q entry) * scale, of those whose window has ended: inputs q, w,
    # and the entries that a `compress` caches
    "select_entries": _kind(3, (0, 0), "heads", "head_dim", "ratio", "top_k", "scale"),
    # attention of all heads over one key a token that is its value too: the last `window` tokens and a sink a head (the
    # weight); inputs q and kv
    "window_attention": _kind(2, (1, 1), "heads", "window", "scale"),
    # the same over these and over all entries (a third input) whose window of `ratio` tokens has ended
    "compressed_attention": _kind(3, (1, 1), "heads", "window", "ratio", "scale"),
    # or over those that a select_entries (a fourth input) names
    "sparse_compressed_attention": _kind(4, (1, 1), "heads", "window", "ratio", "scale"),
    # as `route`, with the experts that a table [vocab * top_k] names for the row's token
    "route_by_token": _kind(1, (1, 1), "top_k", "score", "normalize", "scale"),
}
COLLECTIVES = frozenset(("all_reduce", "all_gather"))
"""The ops in which ranks exchange values; their kernels are called as they are."""


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

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        """All ops by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def slots(self) -> Mapping[str, Weight]:
        """All weight slots by name."""
        return {weight.name: weight for weight in self.weights}

    @property
    def widths(self) -> dict[str, int]:
        """Columns of every value."""
        return {name: width for op in self.ops for name, width in op.outputs}

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

    def attention(self, name: str, qkv: tuple[str, str, str], *, layer: int, head_dim: int, scale: float,
                  window: int, sinks: bool = False) -> str:  # fmt: skip
        """Causal grouped-query attention over the cache of ``layer``; head counts follow from the widths.

        With ``sinks`` the slot ``NAME.sinks`` [heads] holds one more logit a head.
        """
        heads, kv_heads = self.widths[qkv[0]] // head_dim, self.widths[qkv[1]] // head_dim
        slots = (self.weight(f"{name.rpartition('.')[0]}.sinks", (heads,), ("heads",)),) if sinks else ()
        return self._op("attention", name, qkv, slots, heads * head_dim, layer=layer, heads=heads, kv_heads=kv_heads,
                        head_dim=head_dim, scale=scale, window=window)  # fmt: skip

    def layernorm(self, name: str, x: str, eps: float) -> str:
        """LayerNorm over the whole width, with weight and bias."""
        width = self.widths[x]
        slots = (self.weight(name, (width,), ("hidden",)), self.weight(f"{name}.bias", (width,), ("hidden",)))
        return self._op("layernorm", name, (x,), slots, width, eps=eps)

    def columns(self, name: str, x: str, start: int, stop: int, period: int = 0) -> str:
        """Columns [start, stop) of every ``period`` columns of x (0: of the whole width)."""
        period = period or self.widths[x]
        width = self.widths[x] // period * (stop - start)
        return self._op("columns", name, (x,), (), width, period=period, start=start)

    def rotate(self, name: str, x: str, frequencies: str, *, rotated: int, start: int = 0, period: int = 0,
               factor: float = 1.0, pairs: bool = True, sign: int = 1) -> str:  # fmt: skip
        """Rotary embedding of ``rotated`` columns from ``start`` on in every ``period`` columns (0: all)."""
        slot = self.weight(frequencies, (rotated // 2,), ("head_dim",))
        return self._op("rotate", name, (x,), (slot,), self.widths[x], period=period or self.widths[x], start=start,
                        rotated=rotated, pairs=int(pairs), sign=sign, factor=factor)  # fmt: skip

    def head_linear(self, name: str, x: str, heads: int, width: int, axes: tuple[str, str]) -> str:
        """Head h of x [rows, heads * in] times its own rows of w [heads * width, in]: [rows, heads * width]."""
        slot = self.weight(name, (heads * width, self.widths[x] // heads), axes)
        return self._op("head_linear", name, (x,), (slot,), heads * width, heads=heads)

    def latent_attention(self, name: str, q: tuple[str, str], key: tuple[str, str], selection: str = "", *, layer: int,
                         heads: int, scale: float) -> str:  # fmt: skip
        """Causal attention of all heads over one cached key [latent | rope] a token; the value is its latent part.

        ``q`` and ``key`` are (latent part, rope part); with a ``selection`` only the positions it names are seen.
        """
        latent, rope = self.widths[key[0]], self.widths[key[1]]
        kind, inputs = (
            ("sparse_latent_attention", (*q, *key, selection)) if selection else ("latent_attention", q + key)
        )
        return self._op(kind, name, inputs, (), heads * latent, layer=layer, heads=heads, latent=latent, rope=rope,
                        scale=scale)  # fmt: skip

    def index_select(self, name: str, q: str, k: str, weights: str, *, layer: int, top_k: int, scale: float) -> str:
        """Positions of the ``top_k`` cached index keys that score highest, [rows, top_k], ascending, then -1."""
        heads, head_dim = self.widths[weights], self.widths[k]
        return self._op("index_select", name, (q, k, weights), (), top_k, layer=layer, heads=heads, head_dim=head_dim,
                        top_k=top_k, scale=scale)  # fmt: skip

    def gated(self, name: str, gate: str, up: str, act: str, limit: float = 0.0) -> str:
        """act(gate) * up; a ``limit`` clamps gate from above and up on both sides first."""
        return self._op("gated", name, (gate, up), (), self.widths[gate], act=act, limit=limit)

    def route(self, name: str, logits: str, *, top_k: int, score: str, normalize: bool, bias: bool = False,
              groups: int = 1, top_groups: int = 1, group_score: str = "max", scale: float = 1.0) -> str:  # fmt: skip
        """Choose ``top_k`` experts a row: [rows, 2 * top_k], ids in order of falling score, then weights.

        ``score`` of the logits: softmax over all, sigmoid, sqrt_softplus, or softmax_chosen (over the chosen logits).
        With ``bias`` the slot ``NAME.bias`` [experts] is added to the scores that choose, and not to the weights. Of
        ``groups`` equal groups only the ``top_groups`` best are open, by the max or the sum of the top2 of their
        scores. ``normalize`` divides the weights by their sum; then they are multiplied by ``scale``.
        """
        slots = (self.weight(f"{name}.bias", (self.widths[logits],), ("experts",)),) if bias else ()
        return self._op("route", name, (logits,), slots, 2 * top_k, top_k=top_k, score=score, groups=groups,
                        top_groups=top_groups, group_score=group_score, normalize=int(normalize),
                        scale=scale)  # fmt: skip

    def expert_linear(self, name: str, x: str, route: str, experts: int, width: int, axes: tuple[str, str], *,
                      bias: bool = False, fuse: str = "") -> str:  # fmt: skip
        """x times the rows [width, in] of every chosen expert: [rows, top_k * width]; w is [experts * width, in]."""
        top_k = self.widths[route] // 2
        slots = self._expert_slots(name, experts, width, self.widths[x], axes, bias)
        return self._op("expert_linear", name, (x, route), slots, top_k * width, fuse, experts=experts, top_k=top_k)

    def expert_sum(self, name: str, h: str, route: str, experts: int, width: int, axes: tuple[str, str], *,
                   bias: bool = False) -> str:  # fmt: skip
        """The weighted sum over the chosen experts of h [rows, top_k * in] times their rows: [rows, width]."""
        top_k = self.widths[route] // 2
        slots = self._expert_slots(name, experts, width, self.widths[h] // top_k, axes, bias)
        return self._op("expert_sum", name, (h, route), slots, width, experts=experts, top_k=top_k)

    def _expert_slots(
        self, name: str, experts: int, width: int, k: int, axes: tuple[str, str], bias: bool
    ) -> tuple[str, ...]:
        weight = self.weight(name, (experts * width, k), axes)
        return (weight, self.weight(f"{name}.bias", (experts * width,), axes[:1])) if bias else (weight,)

    def add(self, name: str, a: str, b: str) -> str:
        """a + b."""
        return self._op("add", name, (a, b), (), self.widths[a])

    def select(self, name: str, x: str) -> str:
        """The rows of x whose logits are wanted."""
        return self._op("select", name, (x,), (), self.widths[x])

    def repeat(self, name: str, x: str, times: int) -> str:
        """x ``times`` times side by side."""
        return self._op("repeat", name, (x,), (), times * self.widths[x], times=times)

    def unit_norm(self, name: str, x: str, eps: float, group: int) -> str:
        """RMSNorm without a weight over every ``group`` columns."""
        return self._op("unit_norm", name, (x,), (), self.widths[x], eps=eps, group=group)

    def hyper_weights(self, name: str, x: str, f: str, *, streams: int, iterations: int, norm_eps: float,
                      eps: float) -> str:  # fmt: skip
        """How the streams x go into a block and out of it; slots ``NAME.base`` [width] and ``NAME.scale`` [3 or 1].

        f is x times fn; the kernel divides it by the rms of x. Without ``iterations`` only the way in is computed.
        """
        width = self.widths[f]
        slots = (self.weight(f"{name}.base", (width,), ("streams",)),
                 self.weight(f"{name}.scale", (3 if iterations else 1,), ("streams",)))  # fmt: skip
        return self._op("hyper_weights", name, (x, f), slots, width, streams=streams, iterations=iterations,
                        norm_eps=norm_eps, eps=eps)  # fmt: skip

    def hyper_mix(self, name: str, x: str, weights: str, streams: int) -> str:
        """The weighted sum of the streams x, [rows, width / streams]."""
        return self._op("hyper_mix", name, (x, weights), (), self.widths[x] // streams, streams=streams)

    def hyper_join(self, name: str, x: str, weights: str, y: str, streams: int) -> str:
        """The streams x mixed, plus the block's output y in each."""
        return self._op("hyper_join", name, (x, weights, y), (), self.widths[x], streams=streams)

    def compress(self, name: str, c: str, g: str, frequencies: str, *, ratio: int, overlap: bool, rotated: int,
                 eps: float) -> str:  # fmt: skip
        """Entries of every ``ratio`` tokens, their last ``rotated`` columns rotated by the window's first position.

        Slots ``NAME.ape`` [ratio * width of c] and ``NAME.norm``.
        """
        width = self.widths[c] // 2 if overlap else self.widths[c]
        slots = (self.weight(f"{name}.ape", (ratio * self.widths[c],), ("head_dim",)),
                 self.weight(f"{name}.norm", (width,), ("head_dim",)),
                 self.weight(frequencies, (rotated // 2,), ("head_dim",)))  # fmt: skip
        return self._op("compress", name, (c, g), slots, width, ratio=ratio, overlap=int(overlap), rotated=rotated,
                        eps=eps)  # fmt: skip

    def select_entries(self, name: str, q: str, weights: str, entries: str, *, ratio: int, top_k: int,
                       scale: float) -> str:  # fmt: skip
        """The ``top_k`` entries that score highest, [rows, top_k], ascending, then -1."""
        heads, head_dim = self.widths[weights], self.widths[entries]
        return self._op("select_entries", name, (q, weights, entries), (), top_k, heads=heads, head_dim=head_dim,
                        ratio=ratio, top_k=top_k, scale=scale)  # fmt: skip

    def compressed_attention(self, name: str, q: str, kv: str, entries: str = "", selection: str = "", *, window: int,
                             scale: float, ratio: int = 0) -> str:  # fmt: skip
        """Attention over the last ``window`` tokens and over entries of ``ratio`` tokens, all or a ``selection``.

        The slot ``sinks`` beside NAME holds one more logit a head.
        """
        heads = self.widths[q] // self.widths[kv]
        inputs = tuple(value for value in (q, kv, entries, selection) if value)
        kind = {2: "window_attention", 3: "compressed_attention", 4: "sparse_compressed_attention"}[len(inputs)]
        slot = self.weight(f"{name.rpartition('.')[0]}.sinks", (heads,), ("heads",))
        ratios: dict[str, Any] = {"ratio": ratio} if entries else {}
        return self._op(kind, name, inputs, (slot,), self.widths[q], heads=heads, window=window, scale=scale, **ratios)

    def route_by_token(self, name: str, logits: str, vocab: int, *, top_k: int, score: str, normalize: bool,
                       scale: float = 1.0) -> str:  # fmt: skip
        """As ``route``, with the experts that the slot ``NAME.table`` [vocab * top_k] names for the row's token."""
        slot = self.weight(f"{name}.table", (vocab * top_k,), ("vocab",))
        return self._op("route_by_token", name, (logits,), (slot,), 2 * top_k, top_k=top_k, score=score,
                        normalize=int(normalize), scale=scale)  # fmt: skip

    def graph(self, output: str) -> Graph:
        """The finished program."""
        return Graph(tuple(self.ops), tuple(self.weights.values()), output)
