"""What the plan says of a split: the mesh with what its neighbours would cost, what is whole, and what was padded."""

from __future__ import annotations

from tapeout.compiler.partition.axes import Mesh
from tapeout.compiler.partition.degrees import MOST, Weights
from tapeout.compiler.partition.program import RankProgram
from tapeout.compiler.stages import Decision


def decisions(weights: Weights, program: RankProgram) -> tuple[Decision, ...]:
    """What was cut and padded, and the collectives of a step."""
    whole = "every lookup would be summed over the ranks, for 1 / ranks of its bytes"
    return (
        _mesh(weights, program),
        Decision("partition", "embedding", "whole on every rank", "a step reads a row of it", (("split", whole),)),
        *(_padding(*key, padded) for key, padded in program.padded.items() if padded > key[1]),
    )


def _mesh(weights: Weights, program: RankProgram) -> Decision:
    reduces = [op for op in program.ops if op.kind == "all_reduce"]
    heads, kv_heads = program.head_counts
    pieces = f"{program.heads.query.local(heads)} of {heads} query heads"
    pieces += f" and {program.heads.key.local(kv_heads)} of {kv_heads} key heads"
    more = f", {program.heads.added:.0%} of padding" if program.heads.added else ""
    mesh, held = program.mesh, weights.held(program)
    others = ((name, _neighbour(weights, other, held)) for name, other in _neighbours(mesh).items())
    evidence = (
        ("all_reduce", len(reduces)),
        ("values_a_row", sum(op.width for op in reduces)),
        ("padding_and_replication", round(weights.extra(mesh.count * held), 4)),
    )
    reason = f"topology asks for it; a rank has {pieces}{more}"
    return Decision("partition", "mesh", _named(mesh), reason, tuple(each for each in others if each[1]), evidence)


def _named(mesh: Mesh) -> str:
    return f"tensor {mesh.count}, expert {mesh.expert}"


def _neighbours(mesh: Mesh) -> dict[str, Mesh]:
    """Half and twice as many ranks, and experts in half and twice as many groups."""
    counts = [Mesh(count, min(mesh.expert, count)) for count in (mesh.count // 2, 2 * mesh.count) if count <= MOST]
    groups = [Mesh(mesh.count, expert) for expert in (mesh.expert // 2, 2 * mesh.expert)]
    return {_named(other): other for other in (*counts, *groups) if other.expert and other.count % other.expert == 0}


def _neighbour(weights: Weights, other: Mesh, held: int) -> str:
    """What another mesh would mean; empty for one that cannot be."""
    size = weights.split(other)
    if size is None:
        return ""
    return f"a rank would hold {size / held:.2f} times the weights, {weights.extra(other.count * size):+.0%} in all"


def _padding(what: str, size: int, padded: int) -> Decision:
    reason = f"pieces of {size} channels would end within a tile or a block of a weight"
    more = "topology.parallel.expert gives ranks whole experts" if what == "experts" else "a smaller count pads less"
    choice = f"padded from {size} to {padded} channels, {padded / size - 1:.0%} more"
    return Decision("partition", what, choice, reason, (("less padding", more),))
