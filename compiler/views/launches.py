"""Launch lists in few lines: equal layers become one, equal lists are named once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
class Block:
    """Consecutive launches of one layer, and the layers that have exactly these."""

    lines: tuple[Line, ...]
    layers: list[int]


def condense(launches: list[Launch]) -> list[Block]:
    """Launches as blocks; consecutive layers with equal lines share a block."""
    blocks: list[Block] = []
    for layer, group in _by_layer(launches):
        lines = tuple(_line(launch) for launch in group)
        if blocks and layer is not None and blocks[-1].layers and blocks[-1].lines == lines:
            blocks[-1].layers.append(layer)
        else:
            blocks.append(Block(lines, [] if layer is None else [layer]))
    return blocks


def _by_layer(launches: list[Launch]) -> Iterator[tuple[int | None, list[Launch]]]:
    group: list[Launch] = []
    current: int | None = None
    for launch in launches:
        found = indices(launch["op"])
        layer = found[0] if found else None
        if group and layer != current:
            yield current, group
            group = []
        current = layer
        group.append(launch)
    if group:
        yield current, group


def _line(launch: Launch) -> Line:
    numbers = {name: value for name, value in launch["args"].items() if isinstance(value, int | float)}
    shape = f"{numbers['n']}×{numbers['k']}" if "n" in numbers and "k" in numbers else ""
    shown = ("epilogue", "window") if shape else ("k", "window")
    rest = ", ".join(f"{name} {numbers[name]}" for name in shown if numbers.get(name))
    return Line(launch["kernel"], wildcard(launch["op"]), ", ".join(part for part in (shape, rest) if part))


def graph_tables(plan: Plan) -> Iterator[tuple[str, Table | None]]:
    """A title and a table for each launch list; lists that differ only in rows and addresses share one."""
    groups: list[tuple[list[Block], list[Plan]]] = []
    for graph in plan["graphs"]:
        blocks = condense(graph["launches"])
        same = next((graphs for known, graphs in groups if known == blocks), None)
        if same is None:
            groups.append((blocks, [graph]))
        else:
            same.append(graph)
    for blocks, graphs in groups:
        names = ", ".join(f"{graph['name']}" for graph in graphs)
        yield f"{names}: {len(graphs[0]['launches'])} launches", table(("", "kernel", "op", ""), _rows(blocks))


def _rows(blocks: list[Block]) -> Iterator[tuple[str, str, str, str]]:
    for block in blocks:
        plural = "s" if len(block.layers) > 1 else ""
        where = f"layer{plural} {ranges(block.layers)}" if block.layers else ""
        for index, line in enumerate(block.lines):
            yield ("" if index else where, line.kernel, line.op, line.numbers)
