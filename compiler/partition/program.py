"""The program of one rank: ops with the widths of its pieces, and collectives where ranks need each other's values.

A value is whole on all ranks, or split (each rank holds its heads or channels), or partial (ranks hold summands). A
product over a split axis makes a partial value; a reader that needs the whole gets an all_reduce first, and an add of
two partial values stays partial, so that routed and shared experts share one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import lcm
from typing import Literal

from tapeout.compiler.ir import Attr, Graph, Op, Weight
from tapeout.compiler.partition.axes import Cut, Mesh, column_unit, columns_of, row_unit, rows_of, width_over
from tapeout.compiler.partition.heads import ATTENTION, cut_heads, head_counts
from tapeout.compiler.recipes import Constant, Recipe
from tapeout.runtime.errors import TapeoutError

Kind = Literal["whole", "split", "partial"]
Shard = Callable[[Recipe, int], Recipe]
FOLLOWS = frozenset(("rmsnorm", "unit_norm", "rope", "rotate", "columns", "gated"))
TILE = 16  # rows of a tile of CPU kernels; what is cut is cut between tiles


class RankProgram:
    """Goes through a program once. ``shards`` says for each slot what a rank's recipe is."""

    def __init__(self, graph: Graph, recipes: Mapping[str, Recipe], mesh: Mesh) -> None:
        self.recipes, self.mesh = dict(recipes), mesh
        self.slots, self.by_name = dict(graph.slots), graph.by_name
        self.kinds: dict[str, Kind] = {}
        self.widths: dict[str, int] = {}
        self.ops: list[Op] = []
        self.shards: dict[str, Shard] = {}
        self.uses = Counter(slot for op in graph.ops for slot in op.weights)
        self.readers = graph.consumers()
        self.waiting: dict[str, Op] = {}
        self.padded: dict[tuple[str, int], int] = {}
        self.head_counts = head_counts(graph)
        self.heads = cut_heads(graph, recipes, mesh.count)
        self.ffn_unit, self.expert_unit = (_width_unit(graph, recipes, experts=experts) for experts in (False, True))
        for op in graph.ops:
            method = self._attention if op.kind in ATTENTION else getattr(self, f"_{op.kind}", self._other)
            method(op)
        self.output = self._need(graph.output)

    def graph(self) -> Graph:
        """The program of a rank: the same for all, but for the recipes of its weights. Raises TapeoutError."""
        weights = tuple(replace(slot, shape=self.shard(name, 0).shape) for name, slot in self.slots.items())
        return Graph(tuple(self.ops), weights, self.output)

    def shard(self, slot: str, rank: int) -> Recipe:
        """The recipe of a slot on a rank. Raises TapeoutError for a weight that cannot be cut there."""
        cut = self.shards.get(slot)
        try:
            return cut(self.recipes[slot], rank) if cut else self.recipes[slot]
        except TapeoutError as error:
            raise TapeoutError(
                f"topology.count is {self.mesh.count}, and {slot} cannot be cut into that many pieces as it is: {error}"
            ) from error

    def ranks(self) -> tuple[tuple[tuple[str, Recipe], ...], ...]:
        """The recipes of all slots, by rank. Raises TapeoutError."""
        return tuple(tuple((name, self.shard(name, rank)) for name in self.slots) for rank in range(self.mesh.count))

    # -- values

    def _emit(self, op: Op, kind: Kind, width: int, inputs: tuple[str, ...], **attrs: Attr) -> None:
        merged = tuple(sorted((dict(op.attrs) | attrs).items()))
        self.ops.append(replace(op, inputs=inputs, width=width, attrs=merged))
        self.kinds[op.name], self.widths[op.name] = kind, width

    def _need(self, value: str) -> str:
        """The whole of a value: itself, or what a collective makes of it, once."""
        if self.kinds[value] == "whole":
            return value
        kind, suffix = ("all_reduce", "reduced") if self.kinds[value] == "partial" else ("all_gather", "gathered")
        name = f"{value}.{suffix}"
        if name not in self.kinds:
            width = self.by_name[value].width
            self.ops.append(Op(kind, name, (value,), (), width))
            self.kinds[name], self.widths[name] = "whole", width
        return name

    # -- ops

    def _other(self, op: Op) -> None:
        """What every rank does on its own: on whole values, or on its heads and channels where these are split."""
        split = op.kind in FOLLOWS and all(self.kinds[name] == "split" for name in op.inputs)
        if split and not (op.kind == "rmsnorm" and self.slots[op.weights[0]].axes != ("head_dim",)):
            whole = self.by_name[op.inputs[0]].width
            return self._emit(op, "split", self.widths[op.inputs[0]] * op.width // whole, op.inputs)
        return self._emit(op, "whole", op.width, tuple(self._need(name) for name in op.inputs))

    def _add(self, op: Op) -> None:
        """A whole and a partial value wait, where only another value is added to their sum: see ``_join``."""
        waiting = [name for name in op.inputs if name in self.waiting]
        if len(waiting) == 1 and self._join(op, waiting[0]):
            return None
        for name in waiting:
            self._other(self.waiting.pop(name))
        kinds: list[Kind] = [self.kinds[name] for name in op.inputs]
        readers = self.readers.get(op.name, [])
        if sorted(kinds) == ["partial", "whole"] and [reader.kind for reader in readers] == ["add"]:
            self.waiting[op.name] = op
            return None
        if kinds[0] == kinds[1] != "whole":
            return self._emit(op, kinds[0], self.widths[op.inputs[0]], op.inputs)
        return self._other(op)

    def _join(self, op: Op, waiting: str) -> bool:
        """Add a partial value to the partial one that waits first, so that both share an all_reduce, if it is one."""
        other = next(name for name in op.inputs if name != waiting)
        if self.kinds.get(other) != "partial":
            return False
        earlier = self.waiting.pop(waiting)
        whole, partial = sorted(earlier.inputs, key=lambda name: self.kinds[name] != "whole")
        self._emit(earlier, "partial", earlier.width, (partial, other))
        self._emit(op, "whole", op.width, (whole, self._need(waiting)))
        return True

    def _attention(self, op: Op) -> None:
        if self.kinds[op.inputs[0]] != "split":
            return self._other(op)
        query, heads = self.heads.query, op.integer("heads")
        local = query.local(heads)
        for slot in op.weights:
            self.shards[slot] = _by_rows(query, 1)
        more: dict[str, Attr] = {"heads": local}
        if op.kind == "attention":
            more["kv_heads"] = self.heads.key.local(op.integer("kv_heads"))
        inputs = tuple(name if self.kinds[name] == "split" else self._need(name) for name in op.inputs)
        return self._emit(op, "split", op.width // heads * local, inputs, **more)

    def _linear(self, op: Op) -> None:
        x, slot = op.inputs[0], self.slots[op.weights[0]]
        rows, columns = slot.axes
        if self.kinds[x] == "split":
            cut = self._cut(columns, slot.shape[1])
            if cut is not None:
                self.shards[slot.name] = _by_columns(cut[0], cut[1])
                self._once(op, cut[0])
                return self._emit(op, "partial", op.width, op.inputs)
        x, found = self._need(x), self._cut(rows, op.width, row_unit(self.recipes[slot.name].format))
        if found is None:
            return self._emit(op, "whole", op.width, (x,))
        cut, unit = found
        own = self._own_slots(op)
        for name in own.weights:
            self.shards[name] = _by_rows(cut, unit)
        return self._emit(own, "split", cut.local(op.width // unit) * unit, (x,))

    def _cut(self, axis: str, size: int, unit: int = 1) -> tuple[Cut, int] | None:
        """How an axis of ``size`` elements is cut, and the elements of a head; None for one that stays whole.

        ``unit`` is how many rows of the weight share a scale.
        """
        heads, kv_heads = self.head_counts
        if axis == "heads":
            return self.heads.query, size // heads
        if axis == "kv_heads":
            return self.heads.key, size // kv_heads
        if axis == "o_rank":
            return Cut(self.mesh.count, self.heads.key.pads), size // kv_heads
        if axis == "ffn":
            return self._width("feed-forward", size, self.mesh.count, self.ffn_unit), 1
        if axis == "vocab":
            return self._width("vocabulary", size, self.mesh.count, lcm(TILE, unit)), 1
        return None

    def _width(self, what: str, size: int, pieces: int, unit: int) -> Cut:
        cut = width_over(size, pieces, unit)
        self.padded[what, size] = cut.padded(size)
        return cut

    def _own_slots(self, op: Op) -> Op:
        """The op with a slot of its own, where another op needs the whole of it: a head tied to the embedding."""
        if all(self.uses[slot] == 1 for slot in op.weights):
            return op
        shared = self.slots[op.weights[0]]
        self.slots[op.name] = Weight(op.name, shared.shape, shared.axes)
        self.recipes[op.name] = self.recipes[shared.name]
        return replace(op, weights=(op.name, *op.weights[1:]))

    def _once(self, op: Op, cut: Cut) -> None:
        """A bias of summands is added by the rank that holds the first piece."""
        for slot in op.weights[1:]:
            self.shards[slot] = lambda recipe, rank: recipe if cut.piece(rank) == 0 else _zeros(recipe)

    def _head_linear(self, op: Op) -> None:
        if self.kinds[op.inputs[0]] != "split":
            return self._other(op)
        heads = op.integer("heads")
        cut = self.heads.query if heads == self.head_counts[0] else self.heads.key
        self.shards[op.weights[0]] = _by_rows(cut, op.width // heads)
        return self._emit(op, "split", op.width // heads * cut.local(heads), op.inputs, heads=cut.local(heads))

    # -- experts

    def _ffn_of_experts(self, width: int) -> Cut:
        return self._width("experts", width, self.mesh.within, self.expert_unit)

    def _expert_linear(self, op: Op) -> None:
        experts, top_k = op.integer("experts"), op.integer("top_k")
        held, width = experts // self.mesh.expert, op.width // top_k
        cut = self._ffn_of_experts(width)

        def shard(recipe: Recipe, rank: int) -> Recipe:
            return rows_of(self._held(recipe, held * width, rank), self._within(cut, rank), 0, period=width)

        for slot in op.weights:
            self.shards[slot] = shard
        inputs = tuple(self._need(name) for name in op.inputs)
        self._emit(op, "split", top_k * cut.local(width), inputs, experts=held)

    def _expert_sum(self, op: Op) -> None:
        experts, top_k = op.integer("experts"), op.integer("top_k")
        held, width = experts // self.mesh.expert, self.by_name[op.inputs[0]].width // top_k
        cut = self._ffn_of_experts(width)
        self.shards[op.weights[0]] = lambda recipe, rank: columns_of(
            self._held(recipe, held * op.width, rank), self._within(cut, rank), 0
        )
        for slot in op.weights[1:]:
            self.shards[slot] = lambda recipe, rank: (
                self._held(recipe, held * op.width, rank)
                if self.mesh.expert_piece(rank) == 0
                else _zeros(self._held(recipe, held * op.width, rank))
            )
        self._emit(op, "partial", op.width, (op.inputs[0], self._need(op.inputs[1])), experts=held)

    def _held(self, recipe: Recipe, rows: int, rank: int) -> Recipe:
        """The rows of the experts that a rank's group holds."""
        if self.mesh.expert == 1:
            return recipe
        return rows_of(recipe, Cut(self.mesh.expert, first=self.mesh.expert_group(rank)), 0)

    def _within(self, cut: Cut, rank: int) -> Cut:
        return replace(cut, first=self.mesh.expert_piece(rank))


def _width_unit(graph: Graph, recipes: Mapping[str, Recipe], *, experts: bool) -> int:
    """Channels that a piece is a multiple of: rows of gate and up, columns of down, which are cut at one place."""
    unit = TILE
    for slot in graph.weights:
        rows, *columns = slot.axes
        if rows.startswith("experts ") == experts and columns:
            format = recipes[slot.name].format
            unit = lcm(unit, row_unit(format) if rows.endswith("ffn") else 1)
            unit = lcm(unit, column_unit(format) if columns[0] == "ffn" else 1)
    return unit


def _by_rows(cut: Cut, unit: int) -> Shard:
    return lambda recipe, rank: rows_of(recipe, cut, rank, unit=unit)


def _by_columns(cut: Cut, unit: int) -> Shard:
    return lambda recipe, rank: columns_of(recipe, cut, rank, unit=unit)


def _zeros(recipe: Recipe) -> Recipe:
    return Constant((0.0,) * recipe.shape[0])
