"""The passes, one file each, and the whole pipeline on one screen.

A pass is a plain function. Its parameter types are what it reads and its return type is what it writes; the order is
read off these signatures by ``tapeout.compiler.pipeline``.
"""

from __future__ import annotations

from tapeout.compiler.pipeline import Pipeline
from tapeout.passes.assign_formats import assign_formats
from tapeout.passes.fuse_weights import fuse_weights
from tapeout.passes.ingest import ingest
from tapeout.passes.partition import partition
from tapeout.passes.plan_communication import plan_communication
from tapeout.passes.plan_graphs import plan_graphs
from tapeout.passes.plan_memory import plan_memory
from tapeout.passes.select_kernels import select_kernels

PIPELINE = Pipeline(
    ingest,  # Model, Checkpoint -> LogicalModel
    assign_formats,  # LogicalModel, Quantization -> QuantizedModel
    partition,  # QuantizedModel, Topology -> ShardedModel
    fuse_weights,  # ShardedModel -> FusedModel
    plan_communication,  # FusedModel, Device, Topology, Serving -> CommunicationPlan
    select_kernels,  # FusedModel, Device, Topology, Serving -> SelectedModel
    plan_memory,  # SelectedModel, Device, Topology, Serving -> MemoryPlan
    plan_graphs,  # SelectedModel, MemoryPlan -> GraphPlan
)

__all__ = ["PIPELINE"]
