"""Which degrees a model can be split into and what each costs, for the error that refuses one and for the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tapeout.compiler.ir import Graph
from tapeout.compiler.layouts import packed_bytes, tile16_holds
from tapeout.compiler.partition.axes import Mesh
from tapeout.compiler.partition.program import RankProgram
from tapeout.compiler.recipes import Recipe
from tapeout.compiler.stages import generalize
from tapeout.runtime.errors import TapeoutError

MOST = 16  # ranks that a model is split into


class Weights:
    """The weights of a model, and what a rank would hold of them.

    Layers are tried once: weights that differ in their layer alone, of one shape, format and last step, are cut alike.
    """

    def __init__(self, graph: Graph, recipes: Mapping[str, Recipe]) -> None:
        self.graph, self.recipes = graph, recipes
        self.experts = next((op.integer("experts") for op in graph.ops if op.kind == "expert_linear"), 0)
        self.alike = {name: _alike(name, recipe) for name, recipe in recipes.items()}
        self.whole = _total(self.alike, lambda name: _nbytes(recipes[name]))

    def split(self, mesh: Mesh) -> int | None:
        """Bytes of a rank's weights; None for a split that cannot be."""
        if mesh.count == 1:
            return self.whole
        if check_experts(self.experts, mesh):
            return None
        try:
            return self.held(RankProgram(self.graph, self.recipes, mesh))
        except TapeoutError:
            return None

    def held(self, program: RankProgram) -> int:
        """Bytes of a rank's weights. Raises TapeoutError where a rank's cannot be cut."""

        def nbytes(name: str) -> int:
            return max(_nbytes(program.shard(name, rank)) for rank in range(program.mesh.count))

        # a tied head has a slot of its own where it is cut
        alike = {name: self.alike.get(name) or _alike(name, program.recipes[name]) for name in program.slots}
        return _total(alike, nbytes)

    def extra(self, total: int) -> float:
        """What all ranks' weights take more than one rank's, as a share of it: padding and copies."""
        return total / self.whole - 1


Alike = tuple[str, tuple[int, ...], str, str]


def _alike(name: str, recipe: Recipe) -> Alike:
    return generalize(name), recipe.shape, recipe.format, recipe.op


def _total(slots: Mapping[str, Alike], nbytes: Callable[[str], int]) -> int:
    known: dict[Alike, int] = {}
    for name, alike in slots.items():
        if alike not in known:
            known[alike] = nbytes(name)
    return sum(known[alike] for alike in slots.values())


def _nbytes(recipe: Recipe) -> int:
    """Bytes as CPU kernels read them, where a number that the blocks of a row share counts once."""
    tiled = len(recipe.shape) == 2 and tile16_holds(recipe.format)
    return packed_bytes(recipe.shape, recipe.format, "tile16" if tiled else "raw")


def check_experts(experts: int, mesh: Mesh) -> str:
    """Why ``experts`` experts do not make the mesh's groups; empty where they do."""
    asked = f"topology.parallel.expert is {mesh.expert}"
    if mesh.expert == 1:
        return ""
    if not experts:
        return f"{asked}, and the model has no experts"
    if mesh.expert > experts:
        return f"{asked}, more groups than the model has experts, {experts}"
    return f"{asked}, and {experts} experts do not make as many equal groups" if experts % mesh.expert else ""


def check_count(mesh: Mesh) -> str:
    """Why there cannot be as many ranks; empty where there can."""
    if mesh.count <= MOST:
        return ""
    return f"topology.count is {mesh.count}, and a model is split over at most {MOST} ranks"


def legal_counts(weights: Weights, expert: int) -> str:
    """In words, how many ranks there can be and what each number costs."""
    meshes = [(count, Mesh(count, expert)) for count in range(1, MOST + 1) if count % expert == 0]
    return f"legal counts: {_listed(meshes, weights)}"


def legal_groups(weights: Weights, count: int) -> str:
    """In words, the groups of experts that ``count`` ranks can make and what each number costs."""
    meshes = [(expert, Mesh(count, expert)) for expert in range(1, count + 1) if count % expert == 0]
    return f"legal degrees: {_listed(meshes, weights)}"


def _listed(meshes: Iterable[tuple[int, Mesh]], weights: Weights) -> str:
    found: list[str] = []
    what = " padding and replication"
    for degree, mesh in meshes:
        size = weights.split(mesh)
        if size is None:
            continue
        percent = round(100 * weights.extra(mesh.count * size))
        found.append(f"{degree} (+{percent} %{what})" if percent else f"{degree}")
        what = "" if percent else what
    return ", ".join(found)
