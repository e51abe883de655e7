"""A YAML file as plain data that remembers on which line each value was written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from tapeout.compiler.guards import is_list, is_mapping
from tapeout.runtime.errors import TapeoutError

DataPath = tuple[str | int, ...]

_MAX_DEPTH = 16
_MAX_NODES = 20_000
_MAX_BYTES = 1 << 20


@dataclass
class Document:
    """Plain data, and for each path where it was written (``FILE:LINE`` or ``--set ...``), in order."""

    file: str
    data: dict[str, Any]
    places: dict[DataPath, str] = field(default_factory=dict[DataPath, str])

    def place(self, path: DataPath) -> str:
        """Where ``path``, or else its nearest written parent, stands."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.file


def dotted(path: DataPath) -> str:
    """``("quantization", "rules", 0, "format")`` as ``quantization.rules[0].format``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def show(value: Any) -> str:
    """A value as it would be written, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a float"),
    (str, "text"),
    (list, "a list"),
    (dict, "a mapping"),
)


def kind_of(value: Any) -> str:
    """The kind of a value, with its article."""
    if value is None:
        return "nothing"
    for kind, name in _KINDS:
        if isinstance(value, kind):
            return name
    type_name: str = type(value).__name__
    return f"a {type_name}"


def read_document(path: Path) -> Document:
    """Read YAML 1.2 with comments, anchors and merge keys. Raises TapeoutError naming file and line."""
    document = Document(str(path), {})
    root = _parse(_read_text(path), document.file)
    if not is_mapping(root):
        found = "but it is empty" if root is None else f"not {kind_of(root)}"
        raise TapeoutError(f"{document.file}: must hold a mapping of sections, {found}")
    document.data = _Plain(document).mapping(root, (), 0)
    return document


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TapeoutError(f"{path}: larger than {_MAX_BYTES} bytes, which no spec is")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TapeoutError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise TapeoutError(f"{path}: {error.strerror or error}") from error


def _parse(text: str, name: str) -> Any:
    yaml: Any = YAML(typ="rt")
    try:
        return yaml.load(text)
    except DuplicateKeyError as error:
        problem: Any = error
        line: int = problem.problem_mark.line
        key = text.splitlines()[line].split(":")[0].strip(" -'\"{")
        sentence = f"{name}:{line + 1}: the key {key!r} stands twice in one mapping; keep one of them"
        raise TapeoutError(sentence) from error
    except MarkedYAMLError as error:
        problem = error
        mark = problem.problem_mark or problem.context_mark
        where = f":{mark.line + 1}" if mark else ""
        raise TapeoutError(f"{name}{where}: not valid YAML: {problem.problem or problem.context}") from error
    except (YAMLError, RecursionError, ValueError) as error:
        raise TapeoutError(f"{name}: not valid YAML: {str(error).partition(chr(10))[0]}") from error


class _Plain:
    """Converts ruamel's tree to plain data, noting the line of every path."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.nodes = 0

    def mapping(self, node: Any, path: DataPath, depth: int) -> dict[str, Any]:
        """A mapping with merge keys resolved."""
        plain: dict[str, Any] = {}
        for key, value in node.items():
            if not isinstance(key, str):
                place = self.document.place(path)
                raise TapeoutError(f"{place}: {dotted(path) or 'top level'}: keys are text, not {key!r}")
            child = (*path, key)
            self.document.places[child] = f"{self.document.file}:{_key_line(node, key) + 1}"
            plain[str(key)] = self.value(value, child, depth + 1)
        return plain

    def value(self, node: Any, path: DataPath, depth: int) -> Any:
        """Any node; refuses what JSON cannot say, and anchors that would expand without end."""
        self.nodes += 1
        if depth > _MAX_DEPTH or self.nodes > _MAX_NODES:
            raise TapeoutError(f"{self.document.place(path)}: nested or repeated too deeply (an anchor inside itself?)")
        if node is None:
            return None
        if is_mapping(node):
            return self.mapping(node, path, depth)
        if is_list(node):
            return self.items(node, path, depth)
        for kind in (bool, int, float, str):
            if isinstance(node, kind):
                return kind(node)
        raise TapeoutError(f"{self.document.place(path)}: {dotted(path)}: {kind_of(node)} has no meaning here")

    def items(self, node: Any, path: DataPath, depth: int) -> list[Any]:
        """A list."""
        for index in range(len(node)):
            self.document.places[(*path, index)] = f"{self.document.file}:{node.lc.item(index)[0] + 1}"
        return [self.value(item, (*path, index), depth + 1) for index, item in enumerate(node)]


def _key_line(node: Any, key: str) -> int:
    """Line, from 0, where ``key`` was written, be it in a mapping that ``<<: *anchor`` merged in."""
    if key in (node.lc.data or {}):
        return node.lc.key(key)[0]
    for merged in getattr(node.merge, "value", None) or ():
        if key in merged:
            return _key_line(merged, key)
    return node.lc.line
