"""Launch lists in few lines: the layers of a model become one, with the layers that each launch occurs in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.tables import table
from tapeout.compiler.views.text import indices, ranges, wildcard

Launch = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One launch as printed, without its layer number."""

    kernel: str
    op: str
    numbers: str


@dataclass
class Entry:
    """A line and the layers that have it; none outside of layers. Each layer runs its lines from top to bottom."""

    line: Line
    layers: list[int]


def condense(launches: list[Launch]) -> list[Entry]:
    """The launches as one list, in which each layer's own launches are a subsequence in their order."""
    entries: list[Entry] = []
    stack: list[Entry] = []
    for layer, group in groupby(launches, key=layer_of):
        lines = [line_of(launch) for launch in group]
        if layer is None:
            entries += [*stack, *(Entry(line, []) for line in lines)]
            stack = []
        else:
            _merge(stack, layer, lines)
    return entries + stack


def layer_of(launch: Launch) -> int | None:
    """The layer whose op a launch runs; None outside of layers."""
    found = indices(launch["op"])
    return found[0] if found else None


def _merge(stack: list[Entry], layer: int, lines: list[Line]) -> None:
    position = 0
    for line in lines:
        known = next((index for index in range(position, len(stack)) if stack[index].line == line), None)
        if known is None:
            stack.insert(position, Entry(line, [layer]))
            position += 1
        else:
            stack[known].layers.append(layer)
            position = known + 1


def line_of(launch: Launch) -> Line:
    """A launch as it prints."""
    numbers = {name: value for name, value in launch["args"].items() if isinstance(value, int | float)}
    shape = f"{numbers['n']}×{numbers['k']}" if "n" in numbers and "k" in numbers else ""
    shown = ("epilogue", "window") if shape else ("k", "window")
    rest = ", ".join(f"{name} {numbers[name]}" for name in shown if numbers.get(name))
    grid = "×".join(str(blocks) for blocks in launch.get("grid", ()))
    parts = (shape, rest, f"grid {grid}" if grid else "")
    return Line(launch["kernel"], wildcard(launch["op"]), ", ".join(part for part in parts if part))


def graph_tables(plan: Plan) -> Iterator[tuple[str, Table]]:
    """A title and a table for each launch list; lists that differ only in rows and addresses share one."""
    groups: list[tuple[list[Entry], list[Plan]]] = []
    for graph in plan["graphs"]:
        entries = condense(graph["launches"])
        same = next((graphs for known, graphs in groups if known == entries), None)
        if same is None:
            groups.append((entries, [graph]))
        else:
            same.append(graph)
    for entries, graphs in groups:
        names = ", ".join(graph["name"] for graph in graphs)
        rows = ((ranges(entry.layers), entry.line.kernel, entry.line.op, entry.line.numbers) for entry in entries)
        layered = any(entry.layers for entry in entries)
        columns = ("layers" if layered else "", "kernel", "op", "")
        yield f"{names}: {len(graphs[0]['launches'])} launches", table(columns, rows)
