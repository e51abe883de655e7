"""The graph of passes, placed for drawing: one below the other, edges that skip a pass in lanes beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapeout.compiler.pipeline import PassInfo

STEP = 72
"""Height of a pass in the drawing, with the space below it."""


@dataclass(frozen=True)
class Node:
    """One pass: what it reads of the outside and of other passes, what it writes, how many decisions it took."""

    name: str
    outside: tuple[str, ...]
    reads: tuple[str, ...]
    writes: str
    decisions: int
    top: int


@dataclass(frozen=True)
class Edge:
    """A stage on its way from the pass that writes it to one that reads it; lane 0 is straight down."""

    top: int
    bottom: int
    lane: int


@dataclass(frozen=True)
class Drawing:
    """The graph with its height and the number of lanes."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    height: int
    lanes: int


def draw(passes: Sequence[PassInfo], decisions: Sequence[str]) -> Drawing:
    """Passes in order; ``decisions`` names the pass of every decision of the plan."""
    rows = {info.writes: row for row, info in enumerate(passes)}
    nodes = tuple(
        Node(
            name=info.name,
            outside=tuple(kind.__name__ for _, kind in info.reads if kind not in rows),
            reads=tuple(kind.__name__ for _, kind in info.reads if kind in rows),
            writes=info.writes.__name__,
            decisions=decisions.count(info.name),
            top=row * STEP,
        )
        for row, info in enumerate(passes)
    )
    spans = [(rows[kind], row) for row, info in enumerate(passes) for _, kind in info.reads if kind in rows]
    edges, lanes = _lanes(sorted(spans, key=lambda span: (span[1] - span[0], span)))
    return Drawing(nodes, edges, len(nodes) * STEP, lanes)


def _lanes(spans: list[tuple[int, int]]) -> tuple[tuple[Edge, ...], int]:
    """Each skipping edge takes the first lane that is free between its ends."""
    lanes: list[list[tuple[int, int]]] = []
    edges: list[Edge] = []
    for start, stop in spans:
        lane = 0
        if stop - start > 1:
            free = (index for index, taken in enumerate(lanes) if all(stop <= a or start >= b for a, b in taken))
            lane = next(free, len(lanes)) + 1
            if lane > len(lanes):
                lanes.append([])
            lanes[lane - 1].append((start, stop))
        edges.append(Edge(start * STEP, stop * STEP, lane))
    return tuple(edges), len(lanes)
