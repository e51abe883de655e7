"""plan_graphs: one flat launch list a bucket; every argument is an address or a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.stages import (
    Arg,
    Capacity,
    Decision,
    GraphMemory,
    GraphPlan,
    KvRef,
    Launch,
    LaunchList,
    MemoryPlan,
    Placement,
    SelectedModel,
    SizeOf,
    Span,
    WeightRef,
)


def plan_graphs(selected: SelectedModel, memory: MemoryPlan) -> GraphPlan:
    """Bind the body to every prefill and decode bucket and the head to its own."""
    binder = _Binder(selected, memory)
    lists = tuple(binder.bind(graph) for graph in memory.graphs)
    names = ", ".join(entry.name for entry in lists)
    reason = "kernels read the live number of rows; a bucket fixes addresses and the most rows they hold"
    decision = Decision(
        "plan_graphs",
        "buckets",
        names,
        reason,
        (("a launch list for every number of rows", "the same launches with more plan"),),
    )
    return GraphPlan(lists, (decision,))


class _Binder:
    def __init__(self, selected: SelectedModel, memory: MemoryPlan) -> None:
        self.selected, self.memory = selected, memory
        self.buffers = {buffer.name: buffer for buffer in selected.buffers}

    def bind(self, graph: GraphMemory) -> LaunchList:
        launches = self.selected.head if graph.phase == "head" else self.selected.body
        places = {place.buffer: place for place in graph.placements}
        bound = tuple(self._launch(launch, places, graph.rows) for launch in launches)
        return LaunchList(graph.name, graph.phase, graph.rows, bound)

    def _launch(self, launch: Launch, places: Mapping[str, Placement], rows: int) -> dict[str, Any]:
        result: dict[str, Any] = {
            "kernel": launch.kernel,
            "op": launch.op,
            "args": {name: self._arg(arg, places, rows) for name, arg in launch.args},
        }
        if launch.produces:
            buffer = self.buffers[
                next(arg.buffer for name, arg in launch.args if name == launch.output and isinstance(arg, Span))
            ]
            result["output"] = {
                "arg": launch.output,
                "kind": buffer.kind,
                "stride": buffer.columns,
                "cap": rows,
                "terms": buffer.terms,
                "in_place": buffer.name in launch.reads,
            }
            result["produces"] = [{"op": made.op, "columns": [made.start, made.stop]} for made in launch.produces]
        return result

    def _arg(self, arg: Arg, places: Mapping[str, Placement], rows: int) -> Any:
        match arg:
            case Span(buffer, column):
                return ["arena", places[buffer].offset + 4 * column]
            case SizeOf(buffer):
                return places[buffer].nbytes
            case WeightRef(weight):
                return ["weight", weight]
            case KvRef(layer):
                return ["kv", layer * self.memory.kv_layer_bytes]
            case Capacity(terms):
                return rows * terms
            case _:
                return arg
