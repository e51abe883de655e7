"""One change, and how changes print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.compiler.views.text import group_label, wildcard

Pairs = Mapping[str, tuple[str | None, str | None]]
"""For each name, what it was and what it is."""


@dataclass(frozen=True)
class Change:
    """What changed: ``before`` is None for something new, ``after`` for something gone, both for a mere remark."""

    section: str
    subject: str
    before: str | None = None
    after: str | None = None
    effect: str = ""
    bytes: int | None = None
    """How many bytes more (or, negative, fewer) this takes, where that is what it changes."""

    def to_json(self) -> dict[str, Any]:
        """For ``diff --json``."""
        return {
            "section": self.section,
            "subject": self.subject,
            "before": self.before,
            "after": self.after,
            "effect": self.effect,
            "bytes": self.bytes,
        }

    def what(self) -> str:
        """``a → b``, ``added: b``, ``removed: a``."""
        if self.before is not None and self.after is not None:
            return f"{self.before} → {self.after}"
        if self.after is not None:
            return f"added: {self.after}"
        return f"removed: {self.before}" if self.before is not None else ""


def render(changes: Iterable[Change]) -> str:
    """Changes under their section's name, subjects aligned."""
    sections: dict[str, list[Change]] = {}
    for change in changes:
        sections.setdefault(change.section, []).append(change)
    lines: list[str] = []
    for section, members in sections.items():
        lines.append(section)
        width = min(max(len(change.subject) for change in members), 48)
        for change in members:
            body = "; ".join(part for part in (change.what(), change.effect) if part)
            lines.append(f"  {change.subject:<{width}}  {body}".rstrip())
    return "\n".join(lines)


def grouped(section: str, found: Pairs, population: Iterable[str]) -> list[tuple[Change, list[str]]]:
    """Changes of named things, one for all names that differ only in their number and changed alike, with the names."""
    groups: dict[tuple[str, str | None, str | None], list[str]] = {}
    for name, (old, new) in found.items():
        groups.setdefault((wildcard(name), old, new), []).append(name)
    everyone = list(population)
    return [(Change(section, group_label(names, everyone), old, new), names) for (_, old, new), names in groups.items()]
