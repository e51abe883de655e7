"""Loading a spec: the file, then ``--set`` overrides, then the schema."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tapeout.compiler.guards import is_list, is_mapping
from tapeout.compiler.spec.document import DataPath, Document, dotted, read_document
from tapeout.compiler.spec.schema import Spec
from tapeout.compiler.spec.violations import schema_at, validate
from tapeout.runtime.errors import TapeoutError

_STEP = re.compile(r"([A-Za-z_][\w-]*)((?:\[\d+\])*)$")


def load_spec(path: str | Path, overrides: Iterable[str] = ()) -> Spec:
    """Read the spec at ``path`` and apply ``overrides``, each ``a.b=value``, in order.

    A relative ``model.source`` is taken from the folder of the spec, or from the working directory when an override
    gave it. Top-level keys that start with ``x-`` are a place for anchors and are dropped. Raises TapeoutError.
    """
    path = Path(path)
    document = read_document(path)
    document.data = {key: value for key, value in document.data.items() if not key.startswith("x-")}
    _anchor_source(document, path.parent)
    for override in overrides:
        _apply(document, override)
    return validate(Spec, document)


def _anchor_source(document: Document, folder: Path) -> None:
    model = document.data.get("model")
    source = model.get("source") if is_mapping(model) else None
    if is_mapping(model) and isinstance(source, str) and source and not source.startswith("pypi:"):
        model["source"] = os.path.abspath(folder / Path(source).expanduser())


def _apply(document: Document, override: str) -> None:
    key, equals, text = override.partition("=")
    path = _parse_path(key)
    if not equals or path is None:
        raise TapeoutError(f"--set {override}: write it as section.key=value, for example serving.max_context=2048")
    place = f"--set {override}"
    first_new = _assign(document.data, path, _typed(path, text), place)
    for written in [known for known in document.places if known[: len(path)] == path]:
        del document.places[written]
    for length in range(first_new, len(path) + 1):
        document.places[path[:length]] = place


def _parse_path(key: str) -> DataPath | None:
    path: list[str | int] = []
    for step in key.split("."):
        match = _STEP.match(step)
        if match is None:
            return None
        path.append(match[1])
        path.extend(int(index) for index in re.findall(r"\d+", match[2]))
    return tuple(path)


def _typed(path: DataPath, text: str) -> Any:
    """``text`` as the schema wants it at ``path``: itself for text, else JSON where it is JSON."""
    node = schema_at(Spec.model_json_schema(), path)
    kinds = {option.get("type") for option in node.get("anyOf", [node])}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if "string" not in kinds or (value is None and "null" in kinds) or (type(value) is int and "integer" in kinds):
        return value
    return text


def _assign(data: dict[str, Any], path: DataPath, value: Any, place: str) -> int:
    """Set ``path``, making the sections on the way; returns how much of the path, in parts, is new or replaced."""
    node: Any = data
    first_new = len(path)
    for depth, part in enumerate(path):
        empty: Any = value if depth == len(path) - 1 else [] if isinstance(path[depth + 1], int) else {}
        if _ensure(node, part, empty, place, path[:depth]):
            first_new = min(first_new, depth + 1)
        if depth == len(path) - 1:
            node[part] = value
        node = node[part]
    return first_new


def _ensure(node: Any, part: str | int, empty: Any, place: str, parent: DataPath) -> bool:
    """Make ``node[part]`` exist; whether it did not before. Raises TapeoutError where it cannot exist."""
    if is_mapping(node) and isinstance(part, str):
        missing = node.get(part) is None
        if missing:
            node[part] = empty
        return missing
    if not is_list(node) or not isinstance(part, int):
        raise TapeoutError(f"{place}: {dotted(parent)} has nothing called {dotted((part,))} inside")
    if part > len(node):
        raise TapeoutError(f"{place}: {dotted(parent)} has {len(node)} entries, so the next free index is {len(node)}")
    if part == len(node):
        node.append(empty)
        return True
    return False
