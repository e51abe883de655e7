"""Comparing plain sections key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tapeout.compiler.diff.changes import Change
from tapeout.compiler.guards import is_list, is_mapping

_LONGEST = 60
Leaves = dict[str, Any]


def compare_values(section: str, before: Any, after: Any) -> list[Change]:
    """Changed, added and removed leaves, by dotted key."""
    old, new = dict(leaves(before)), dict(leaves(after))
    return [
        Change(section, key, _text(old, key), _text(new, key))
        for key in dict.fromkeys([*old, *new])
        if not _same(old, new, key) and not _filled(key, new) and not _filled(key, old)
    ]


def _same(old: Leaves, new: Leaves, key: str) -> bool:
    both = key in old and key in new
    return both and old[key] == new[key] and type(old[key]) is type(new[key])


def _filled(key: str, other: Leaves) -> bool:
    """Whether ``key`` was an empty list or section that has entries in ``other``, which are reported themselves."""
    return any(name.startswith((f"{key}.", f"{key}[")) for name in other)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted key; lists of plain values are leaves."""
    if is_mapping(value) and value:
        for key, child in value.items():
            yield from leaves(child, f"{path}.{key}" if path else key)
    elif is_list(value) and any(is_mapping(item) for item in value):
        for index, child in enumerate(value):
            yield from leaves(child, f"{path}[{index}]")
    elif value is not None or path:
        yield path, value


def _text(found: Leaves, key: str) -> str | None:
    if key not in found:
        return None
    value = found[key]
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
