"""plan_graphs: one flat launch list a bucket; every argument is an address or a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.stages import (
    Arg,
    AtLeast,
    BuiltKernel,
    Capacity,
    CommRef,
    Decision,
    GraphMemory,
    GraphPlan,
    KvRef,
    Launch,
    LaunchList,
    MemoryPlan,
    Placement,
    Program,
    RankOf,
    SelectedModel,
    SizeOf,
    Span,
    StepRef,
    WeightRef,
)


def plan_graphs(selected: SelectedModel, memory: MemoryPlan) -> GraphPlan:
    """Bind the launches of every bucket to the places that its buffers got."""
    binder = _Binder(selected, memory)
    lists = tuple(binder.bind(*pair) for pair in zip(selected.programs, memory.graphs, strict=True))
    names = ", ".join(entry.name for entry in lists)
    built = [kernel.kernel for kernel in selected.kernels if isinstance(kernel, BuiltKernel)]
    reason = "kernels read the live number of rows; a bucket fixes addresses and the most rows they hold"
    rival = ("a launch list for every number of rows", "the same launches with more plan")
    decisions = [Decision("plan_graphs", "buckets", names, reason, (rival,))]
    if built:
        decisions.append(_capture_decision())
    return GraphPlan(lists, tuple(decisions), tuple((kernel.name, kernel.template) for kernel in built))


def _capture_decision() -> Decision:
    reason = "grids are fixed, arguments are addresses of the plan, and what varies is read from device memory"
    rival = ("launches one by one", "about 11 us of Python a launch, against under 1 us in a replayed graph")
    return Decision("plan_graphs", "capture", "every list is one CUDA graph", reason, (rival,))


class _Binder:
    def __init__(self, selected: SelectedModel, memory: MemoryPlan) -> None:
        self.selected, self.memory = selected, memory
        self.buffers = {buffer.name: buffer for buffer in selected.buffers}

    def bind(self, program: Program, graph: GraphMemory) -> LaunchList:
        places = {place.buffer: place for place in graph.placements}
        bound = tuple(self._launch(launch, places, program.held) for launch in program.launches)
        return LaunchList(graph.name, graph.phase, graph.rows, bound)

    def _launch(self, launch: Launch, places: Mapping[str, Placement], rows: int) -> dict[str, Any]:
        result: dict[str, Any] = {
            "kernel": launch.kernel,
            "op": launch.op,
            "args": {name: self._arg(arg, places, rows) for name, arg in launch.args},
        }
        if launch.grid:
            result["grid"] = list(launch.grid)
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

    def _arg(  # noqa: PLR0911 - one a kind
        self, arg: Arg, places: Mapping[str, Placement], rows: int
    ) -> Any:
        match arg:
            case Span(buffer, column):
                return ["arena", places[buffer].offset + 4 * column]
            case SizeOf(buffer):
                return places[buffer].nbytes
            case WeightRef(weight):
                return ["weight", weight]
            case StepRef(field):
                return ["step", field]
            case KvRef(cache):
                return ["kv", self.memory.cache_offsets[cache]]
            case Capacity(terms):
                return rows * terms
            case AtLeast(least):
                return int(rows >= least)
            case CommRef():
                return ["comm", 0]
            case RankOf(ranks, times):
                return ["rank", [ranks, times]]
            case _:
                return arg
