"""How query and key heads are cut over ranks: together, copied or padded, and between the blocks of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm

from tapeout.compiler.ir import Graph
from tapeout.compiler.partition.axes import Cut, column_unit, row_unit, up
from tapeout.compiler.recipes import Convert, Recipe

ATTENTION = frozenset(("attention", "latent_attention", "sparse_latent_attention", "window_attention",
                       "compressed_attention", "sparse_compressed_attention"))  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """The cuts of query and key heads, which belong together: a rank needs the key heads that its query heads read."""

    query: Cut
    key: Cut
    added: float
    """Query heads that are padding, as a share of the model's."""


@dataclass(frozen=True)
class Steps:
    """Query and key heads whose channels end where blocks of their weights, or rows that share a scale, end too."""

    query: int = 1
    key: int = 1


def cut_heads(graph: Graph, recipes: Mapping[str, Recipe], count: int) -> Heads:
    """The cut of a program's heads over ``count`` ranks."""
    heads, kv_heads = head_counts(graph)
    # a key head is copied where it is one, and not a group of output heads
    copy = any(op.kind == "attention" for op in graph.ops)
    return heads_over(heads, kv_heads, count, steps=_steps(graph, recipes, (heads, kv_heads)), copy=copy)


def head_counts(graph: Graph) -> tuple[int, int]:
    """Query heads, and key heads or groups of heads that must stay together. Programs have one kind of attention."""
    for op in graph.ops:
        if op.kind == "attention":
            return op.integer("heads"), op.integer("kv_heads")
        if op.kind in ATTENTION:
            heads = op.integer("heads")
            groups = [o.integer("heads") for o in graph.ops if o.kind == "head_linear" and o.integer("heads") != heads]
            return heads, min([heads, *groups])
    return 1, 1


def heads_over(heads: int, kv_heads: int, count: int, *, steps: Steps = Steps(), copy: bool = True) -> Heads:
    """The cut of ``heads`` query and ``kv_heads`` key heads over ``count`` ranks that pads the fewest heads.

    Key heads are cut (their number padded to a multiple of the ranks), or, with ``copy``, each is copied to the ranks
    that share its query heads (whose number is padded to a multiple of the copies). What a rank has of either is a
    multiple of its step. Heads of zeros go behind all others or, with copies, behind those of each key head, which
    then must be whole steps.
    """
    group = heads // kv_heads
    kv = up(kv_heads, count * lcm(steps.query // gcd(steps.query, group), steps.key))
    cut = Heads(Cut(count, ((heads, kv * group),)), Cut(count, ((kv_heads, kv),)), kv / kv_heads - 1)
    if not copy or count % kv_heads or count == kv_heads or group % steps.query or steps.key > 1:
        return cut
    copies = count // kv_heads
    wide = up(group, copies * steps.query)
    copied = Heads(Cut(count, ((group, wide),)), Cut(kv_heads, (), copies), wide / group - 1)
    return min(cut, copied, key=lambda way: way.added)


def _steps(graph: Graph, recipes: Mapping[str, Recipe], counts: tuple[int, int]) -> Steps:
    query, key, slots = 1, 1, graph.slots
    for op in graph.ops:
        if op.kind not in ("linear", "head_linear"):
            continue
        slot, recipe = slots[op.weights[0]], recipes[op.weights[0]]
        # heads of a head_linear are groups of rows alone: its columns are those of one head
        for side, axis in enumerate(slot.axes if op.kind == "linear" else slot.axes[:1]):
            unit = column_unit(recipe.format) if side else _rows_together(recipe)
            if axis == "heads":
                query = lcm(query, _step(unit, slot.shape[side] // counts[0]))
            elif axis in ("kv_heads", "o_rank"):
                key = lcm(key, _step(unit, slot.shape[side] // counts[1]))
    return Steps(query, key)


def _step(unit: int, channels: int) -> int:
    """Heads of so many channels that make whole units."""
    return unit // gcd(unit, channels)


def _rows_together(recipe: Recipe) -> int:
    """Rows that share a scale of the checkpoint; one that a conversion makes is made of what a rank has."""
    return 1 if isinstance(recipe, Convert) else row_unit(recipe.format)
