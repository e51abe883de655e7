"""Type guards for data that came from JSON or YAML."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_mapping(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether ``value`` is a mapping."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether ``value`` is a list."""
    return isinstance(value, list)
