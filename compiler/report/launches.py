"""Launch lists by phase and bucket, with the bytes of weights that each launch reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from tapeout.compiler.guards import is_list
from tapeout.compiler.views.launches import Entry, Launch, condense, layer_of, line_of
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.text import ranges, wildcard

_LOOK_UPS = {"embed", "experts"}
"""Templates of kernels, or kernels of a plan without any, that read a row of a table for each of theirs."""
_COLLECTIVE = "collective"
"""Template of the kernels in which ranks exchange data."""


@dataclass(frozen=True)
class Row:
    """A launch, of every layer that has it; its figures are of all of them, at most, when the list is full.

    ``bytes`` counts the weights they read.
    """

    layers: str
    count: int
    kernel: str
    template: str
    op: str
    numbers: str
    bytes: int


@dataclass(frozen=True)
class LaunchList:
    """Launch lists of one phase that differ only in rows and addresses. ``rows`` are of the first."""

    names: tuple[str, ...]
    phase: str
    up_to: int
    launches: int
    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        """Bytes of weights that the first list reads at most."""
        return sum(row.bytes for row in self.rows)


@dataclass(frozen=True)
class Reader:
    """Tells what a launch reads of the weights."""

    weights: Mapping[str, Plan]
    templates: Mapping[str, str]
    experts: Mapping[str, tuple[int, int]]
    """For the products of experts: how many there are, and how many a row chooses."""

    def template(self, kernel: str) -> str:
        """The template of a kernel."""
        return self.templates.get(kernel, kernel)

    def bytes_of(self, launch: Launch, rows: int) -> int:
        """At most, when the list is full: the rows of an embedding that are looked up, the experts that are chosen."""
        named = {value[1] for value in launch["args"].values() if is_list(value) and value[0] == "weight"}
        return sum(self._read(self.weights[name], launch, rows) for name in sorted(named) if name in self.weights)

    def _read(self, weight: Plan, launch: Launch, rows: int) -> int:
        axes = weight.get("axes") or ("",)
        if axes[0] == "vocab" and {self.template(launch["kernel"]), launch["kernel"]} & _LOOK_UPS:
            return -(-weight["bytes"] * rows // max(weight["shape"][0], rows))
        experts, chosen = self._choice(launch)
        if experts and axes[0].startswith("experts") and len(weight["shape"]) > 1:  # a router's bias is read whole
            return weight["bytes"] * min(experts, rows * chosen) // experts
        return weight["bytes"]

    def _choice(self, launch: Launch) -> tuple[int, int]:
        """How many experts there are in a launch, and how many a row chooses; 0 of both for other launches."""
        args = launch["args"]
        if "experts" in args and "top_k" in args:
            return args["experts"], args["top_k"]
        return self.experts.get(wildcard(launch["op"]), (0, 0))


def reader_of(plan: Plan) -> Reader:
    """A reader of a plan's launches."""
    chosen = {
        decision["subject"]: (decision["evidence"]["experts"], decision["evidence"]["top_k"])
        for decision in plan["decisions"]
        if {"experts", "top_k"} <= decision.get("evidence", {}).keys()
    }
    templates = {kernel["name"]: kernel["template"] for kernel in plan["kernels"]["table"]}
    return Reader({weight["name"]: weight for weight in plan["weights"]}, templates, chosen)


def launch_lists(plan: Plan) -> list[LaunchList]:
    """All lists, those of a phase with equal launches together."""
    reader = reader_of(plan)
    groups: list[tuple[list[Entry], list[Plan]]] = []
    for graph in plan["graphs"]:
        entries = condense(graph["launches"])
        same = (graphs for known, graphs in groups if known == entries and graphs[0]["phase"] == graph["phase"])
        found = next(same, None)
        if found is None:
            groups.append((entries, [graph]))
        else:
            found.append(graph)
    return [_list(reader, entries, graphs) for entries, graphs in groups]


def bytes_of_list(reader: Reader, graph: Plan) -> int:
    """Bytes of weights that a full list reads at most."""
    return sum(reader.bytes_of(launch, graph["rows"]) for launch in graph["launches"])


def _list(reader: Reader, entries: Iterable[Entry], graphs: list[Plan]) -> LaunchList:
    first = graphs[0]
    of_layers = {(line_of(launch), layer_of(launch)): launch for launch in first["launches"]}
    rows: list[Row] = []
    for entry in entries:
        alike = [of_layers[entry.line, layer] for layer in entry.layers or [None]]
        rows.append(_row(reader, entry, alike, first["rows"]))
    names = tuple(graph["name"] for graph in graphs)
    return LaunchList(names, first["phase"], first["rows"], len(first["launches"]), tuple(rows))


def _row(reader: Reader, entry: Entry, alike: list[Launch], rows: int) -> Row:
    line = entry.line
    return Row(
        layers=_layers(entry.layers),
        count=len(alike),
        kernel=line.kernel,
        template=reader.template(line.kernel),
        op=line.op,
        numbers=line.numbers,
        bytes=sum(reader.bytes_of(launch, rows) for launch in alike),
    )


def _layers(layers: list[int]) -> str:
    """``0-4, 6``; every second or third layer as ``3, 5, … 41``."""
    strides = {b - a for a, b in pairwise(layers)}
    if len(layers) > 3 and len(strides) == 1 and strides != {1}:
        return f"{layers[0]}, {layers[1]}, … {layers[-1]}"
    return ranges(layers)


def collectives(plan: Plan, lists: Iterable[LaunchList]) -> list[LaunchList]:
    """The launches in which ranks exchange data, list by list; empty for one rank."""
    kinds = {made["kind"] for entry in plan["communication"]["lists"] for made in entry["collectives"]}
    kept = (
        (one, tuple(row for row in one.rows if row.template == _COLLECTIVE or row.kernel in kinds)) for one in lists
    )
    return [replace(one, rows=rows) for one, rows in kept if rows]
