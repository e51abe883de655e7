"""fuse_weights: projections of one input become one matrix, parts in declared order, where their formats agree."""

from __future__ import annotations

from itertools import groupby

from tapeout.compiler.ir import Graph, Op, Weight
from tapeout.compiler.recipes import Recipe, joined, joins_with
from tapeout.compiler.stages import Decision, FusedModel, ShardedModel, merge_decisions


def fuse_weights(sharded: ShardedModel) -> FusedModel:
    """Join neighbours that declare the same ``fuse`` group, input, format and presence of a bias."""
    graph = sharded.graph
    slots, ranks = dict(graph.slots), [dict(recipes) for recipes in sharded.ranks]
    formats = {name: recipe.format for name, recipe in sharded.ranks[0]}
    ops: list[Op] = []
    decisions: list[Decision] = []
    groups: dict[str, list[Op]] = {}
    for op in graph.ops:
        groups.setdefault(op.fuse, []).append(op)

    def kind(op: Op) -> tuple[str, str, str, int]:
        if not op.fuse:
            return (op.name, "", "", 0)
        return (op.fuse, op.inputs[0], joins_with(ranks[0][op.weights[0]], _groups(op)), len(op.weights))

    for _, run in groupby(graph.ops, key=kind):
        parts = list(run)
        if len(parts) == 1:
            ops.append(parts[0])
        else:
            ops.append(_join(parts, slots, ranks))
        if parts[0].fuse:
            decisions.append(_decide(parts, groups[parts[0].fuse], formats))
    fused = Graph(tuple(ops), tuple(slots.values()), graph.output)
    ordered = tuple(tuple((name, recipes[name]) for name in slots) for recipes in ranks)
    return FusedModel(sharded, fused, ordered, merge_decisions(decisions))


def _join(parts: list[Op], slots: dict[str, Weight], ranks: list[dict[str, Recipe]]) -> Op:
    """One op over the concatenation; its slots replace those of the parts."""
    whole = _fused_name(parts)
    weights: list[str] = []
    for index, suffix in enumerate(("", ".bias")[: len(parts[0].weights)]):
        names = [op.weights[index] for op in parts]
        sources = [slots.pop(name) for name in names]
        rows = sum(slot.shape[0] for slot in sources)
        slots[whole + suffix] = Weight(whole + suffix, (rows, *sources[0].shape[1:]), sources[0].axes)
        for recipes in ranks:
            recipes[whole + suffix] = joined([recipes.pop(name) for name in names], _groups(parts[0]))
        weights.append(whole + suffix)
    width = sum(op.width for op in parts)
    return Op(parts[0].kind, whole, parts[0].inputs, tuple(weights), width, parts[0].attrs, fuse=parts[0].fuse,
              parts=tuple((op.name, op.width) for op in parts))  # fmt: skip


def _groups(op: Op) -> int:
    """Parts of an op over experts are joined expert by expert."""
    return op.integer("experts") if op.kind == "expert_linear" else 1


def _fused_name(parts: list[Op]) -> str:
    """The group's name, or that of a partial fusion: qk_proj of q_proj and k_proj."""
    at, _, last = parts[0].fuse.rpartition(".")
    short = [op.name.rpartition(".")[2].removesuffix("_proj") for op in parts]
    joined = ("" if all(len(word) == 1 for word in short) else "_").join(short) + "_proj"
    return parts[0].fuse if joined == last else f"{at}.{joined}"


def _decide(parts: list[Op], group: list[Op], formats: dict[str, str]) -> Decision:
    """What became of ``parts``, a run of the ops of ``group``."""
    names = ", ".join(op.name.rpartition(".")[2] for op in parts)
    if len(parts) == len(group):
        return Decision(
            "fuse_weights", parts[0].fuse, f"one matrix: {names}", "same input and format, in declared order"
        )
    why = "their number formats differ, and requantizing one would change its values"
    if len({formats[op.weights[0]] for op in group}) == 1:
        why = "rows that share scales join in whole tiles of one format, and the checkpoint's scales stay as they are"
    choice = f"kept apart: {names}" if len(parts) == 1 else f"one matrix: {names}"
    return Decision("fuse_weights", parts[0].fuse, choice, why, (("one matrix for the whole group", why),))
