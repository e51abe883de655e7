"""partition: the model that was written for one device becomes the program and the weights of every rank."""

from __future__ import annotations

from tapeout.compiler.partition.axes import Mesh
from tapeout.compiler.partition.program import RankProgram
from tapeout.compiler.spec import Topology
from tapeout.compiler.stages import QuantizedModel, ShardedModel


def partition(quantized: QuantizedModel, topology: Topology) -> ShardedModel:
    """Cut heads, feed-forward, vocabulary and experts by rule, and insert the collectives that this makes necessary."""
    mesh = Mesh(topology.count, topology.parallel.expert)
    graph, recipes = quantized.logical.graph, quantized.recipes
    if mesh.count == 1:
        return ShardedModel(quantized, mesh, graph, (recipes,), ())
    program = RankProgram(graph, dict(recipes), mesh)
    split = program.build()
    return ShardedModel(quantized, mesh, split, program.ranks(), program.decisions())
