"""Runs passes in the order their signatures imply, checks each stage, and reuses results whose inputs are unchanged."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, cast, get_type_hints

import networkx as nx
from pydantic import BaseModel

from tapeout.compiler.recipes import Recipe
from tapeout.runtime.errors import TapeoutError

Stage = TypeVar("Stage")
Memo = MutableMapping[str, object]
Callback = Callable[[str, bool], None]


@dataclass(frozen=True)
class PassInfo:
    """One pass: its name, what it reads by parameter, and what it writes."""

    name: str
    run: Callable[..., object]
    reads: tuple[tuple[str, type], ...]
    writes: type


class Results:
    """The stages a run made, by type."""

    def __init__(self, values: Mapping[type, object], reused: Iterable[str]) -> None:
        self._values = values
        self.reused = tuple(reused)

    def get(self, stage: type[Stage]) -> Stage:
        """The stage of a type."""
        return cast(Stage, self._values[stage])


class Pipeline:
    """An ordered set of passes. Raises ValueError for a cycle, a type that two passes write, or wrong signatures."""

    def __init__(self, *passes: Callable[..., object]) -> None:
        infos = [_inspect(function) for function in passes]
        self.graph = _graph(infos)
        order = {name: index for index, name in enumerate(nx.lexicographical_topological_sort(self.graph))}
        self.passes = tuple(sorted(infos, key=lambda info: order[info.name]))

    def run(self, *inputs: object, memo: Memo | None = None, callback: Callback | None = None) -> Results:
        """Run every pass. ``memo`` keeps results by input digest; ``callback(name, reused)`` is told of each pass."""
        read = {kind for info in self.passes for _, kind in info.reads}
        values: dict[type, object] = {_filed_under(value, read): value for value in inputs}
        digests = {kind: digest(value) for kind, value in values.items()} if memo is not None else {}
        reused: list[str] = []
        for info in self.passes:
            missing = [kind.__name__ for _, kind in info.reads if kind not in values]
            if missing:
                raise ValueError(
                    f"pass {info.name} reads {', '.join(missing)}, which no pass writes and no input provides"
                )
            key = _key(info, digests) if memo is not None else ""
            if memo is not None and key in memo:
                values[info.writes] = memo[key]
                reused.append(info.name)
            else:
                values[info.writes] = _call(info, values)
                if memo is not None:
                    memo[key] = values[info.writes]
            if memo is not None:
                digests[info.writes] = key
            if callback:
                callback(info.name, info.name in reused)
        return Results(values, reused)

    def draw(self) -> str:
        """The pass graph as text: each pass with what it reads and writes."""
        width = max(len(info.name) for info in self.passes)
        lines = [
            f"{info.name:<{width}}  {', '.join(kind.__name__ for _, kind in info.reads)} -> {info.writes.__name__}"
            for info in self.passes
        ]
        return "\n".join(lines)


def _filed_under(value: object, read: Set[type]) -> type:
    """The class by which passes read an input: its own, or the nearest base that one of them names."""
    return next((kind for kind in type(value).__mro__ if kind in read), type(value))


def _inspect(function: Callable[..., object]) -> PassInfo:
    hints = get_type_hints(function)
    writes = hints.pop("return", None)
    parameters = inspect.signature(function).parameters
    if writes is None or set(parameters) != set(hints):
        raise ValueError(f"pass {function.__name__} must annotate every parameter and what it returns")
    return PassInfo(function.__name__, function, tuple((name, hints[name]) for name in parameters), writes)


def _graph(infos: list[PassInfo]) -> nx.DiGraph[str]:
    writers: dict[type, str] = {}
    for info in infos:
        if info.writes in writers:
            raise ValueError(f"passes {writers[info.writes]} and {info.name} both write {info.writes.__name__}")
        writers[info.writes] = info.name
    graph: nx.DiGraph[str] = nx.DiGraph()
    for info in infos:
        graph.add_node(info.name)
        graph.add_edges_from((writers[kind], info.name) for _, kind in info.reads if kind in writers)
    if not nx.is_directed_acyclic_graph(graph):
        edges: list[tuple[str, str]] = cast(Any, nx).find_cycle(graph)
        cycle = " -> ".join(first for first, _ in edges)
        raise ValueError(f"the passes form a cycle: {cycle}")
    return graph


def _call(info: PassInfo, values: Mapping[type, object]) -> object:
    result = info.run(**{name: values[kind] for name, kind in info.reads})
    check = getattr(result, "check", None)
    if check is not None:
        try:
            check()
        except AssertionError as failure:
            raise TapeoutError(f"pass {info.name} made an invalid {info.writes.__name__}: {failure}") from failure
    return result


def _key(info: PassInfo, digests: Mapping[type, str]) -> str:
    parts = [info.name, *(digests[kind] for _, kind in info.reads)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def digest(value: object) -> str:
    """Digest of an immutable value: frozen dataclasses, pydantic models, and plain containers of them."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    plain: Any = value
    if isinstance(value, Recipe):
        plain = value.digest
    elif isinstance(value, BaseModel):
        plain = [type(value).__name__, value.model_dump(mode="json")]
    elif is_dataclass(value) and not isinstance(value, type):
        plain = [type(value).__name__, *(_plain(getattr(value, field.name)) for field in fields(value))]
    elif isinstance(value, Mapping):
        plain = {str(key): _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    elif isinstance(value, list | tuple):
        plain = [_plain(item) for item in cast(list[Any], value)]
    elif value is not None and not isinstance(value, str | int | float | bool):
        plain = repr(value)
    return plain
