"""partition: the model that was written for one device becomes the program and the weights of every rank."""

from __future__ import annotations

from tapeout.compiler.partition.axes import Mesh
from tapeout.compiler.partition.decisions import decisions
from tapeout.compiler.partition.degrees import Weights, check_count, check_experts, legal_counts, legal_groups
from tapeout.compiler.partition.program import RankProgram
from tapeout.compiler.spec import Topology
from tapeout.compiler.stages import QuantizedModel, ShardedModel
from tapeout.runtime.errors import TapeoutError


def partition(quantized: QuantizedModel, topology: Topology) -> ShardedModel:
    """Cut heads, feed-forward, vocabulary and experts by rule, and insert the collectives that this makes necessary.

    Raises TapeoutError with the legal degrees and what each costs.
    """
    mesh = Mesh(topology.count, topology.parallel.expert)
    graph, recipes = quantized.logical.graph, dict(quantized.recipes)
    if mesh.count == 1:
        return ShardedModel(quantized, mesh, graph, (quantized.recipes,), ())
    weights = Weights(graph, recipes)
    _check(weights, mesh)
    try:
        program = RankProgram(graph, recipes, mesh)
        split, ranks = program.graph(), program.ranks()
    except TapeoutError as error:
        legal = legal_counts(weights, mesh.expert)
        raise TapeoutError(f"{error}; {legal}; a rule that converts the weight avoids this") from error
    return ShardedModel(quantized, mesh, split, ranks, decisions(weights, program))


def _check(weights: Weights, mesh: Mesh) -> None:
    """Raises TapeoutError for more ranks than there can be, or for groups that the experts do not make."""
    wrong = check_count(mesh)
    if wrong:
        raise TapeoutError(f"{wrong}; {legal_counts(weights, mesh.expert)}")
    wrong = check_experts(weights.experts, mesh)
    if wrong:
        raise TapeoutError(f"{wrong}; {legal_groups(weights, mesh.count)}")
