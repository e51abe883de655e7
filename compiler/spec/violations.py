"""Checking a document against a schema, with the first violation said in one sentence."""

from __future__ import annotations

import difflib
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tapeout.compiler.guards import is_list, is_mapping
from tapeout.compiler.spec.document import DataPath, Document, dotted, kind_of, show
from tapeout.runtime.errors import TapeoutError

ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(kind: type[ModelT], document: Document) -> ModelT:
    """The document as a ``kind``. Raises TapeoutError: place, dotted path, rule, legal values."""
    try:
        return kind.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        problems: list[dict[str, Any]] = [dict(problem) for problem in error.errors()]
    order = {path: index for index, path in enumerate(document.places)}
    paths = [_data_path(document.data, problem["loc"]) for problem in problems]
    first = min(range(len(problems)), key=lambda i: order.get(paths[i], len(order)))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    path = paths[first]
    raise TapeoutError(f"{document.place(path)}: {dotted(path)}: {_rule(kind, path, problems[first])}{more}")


def _data_path(data: Any, location: DataPath) -> DataPath:
    """The part of a pydantic location that is a path in the data (unions add their member's name)."""
    path: DataPath = ()
    for part in location:
        if is_mapping(data) and isinstance(part, str):
            data = data.get(part)
        elif is_list(data) and isinstance(part, int):
            data = data[part]
        else:
            break
        path = (*path, part)
    return path


_RULES = {
    "missing": "required, but missing",
    "value_error": "{error}",
    "literal_error": "{value} is not one of: {expected}",
    "greater_than": "{value} is too small; it must be more than {gt}",
    "greater_than_equal": "{value} is too small; the least is {ge}",
    "less_than_equal": "{value} is too large; the most is {le}",
    "finite_number": "{value} is not a finite number",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}
_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "string_type": "text",
    "bool_type": "true or false",
    "float_type": "a number",
    "tuple_type": "a list",
    "model_type": "a section (keys with values)",
    "dict_type": "a section (keys with values)",
}


def _rule(kind: type[BaseModel], path: DataPath, problem: dict[str, Any]) -> str:
    value, code = problem["input"], problem["type"]
    if code == "extra_forbidden":
        return _unknown_key(str(path[-1]), section_keys(kind, path[:-1]))
    context: dict[str, Any] = problem.get("ctx", {})
    if code == "too_short" and context["min_length"] > 1:
        return f"needs at least {context['min_length']} entries, got {show(value)} ({kind_of(value)})"
    if code in _RULES:
        expected = str(context.get("expected")).replace("'", "").replace(" or ", ", ")
        return _RULES[code].format(**(context | {"expected": expected, "value": show(value)}))
    return f"needs {_WANTED.get(code, problem['msg'])}, got {show(value)} ({kind_of(value)})"


def _unknown_key(key: str, legal: list[str]) -> str:
    close = difflib.get_close_matches(key, legal, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown key; {hint}keys here: {', '.join(legal)}"


def section_keys(kind: type[BaseModel], path: DataPath) -> list[str]:
    """The keys that the section at ``path`` knows, sorted; empty when ``path`` leads nowhere."""
    return sorted(schema_at(kind.model_json_schema(), path).get("properties", {}))


def schema_at(schema: dict[str, Any], path: DataPath) -> dict[str, Any]:
    """The sub-schema at ``path``, with references followed; an empty dict when there is none."""
    node = _follow(schema, schema)
    for part in path:
        child = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part, {})
        node = _follow(schema, child)
    return node


def _follow(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        return schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    options = [_follow(schema, option) for option in node.get("anyOf", [])]
    return next((option for option in options if "properties" in option or "items" in option), node)
