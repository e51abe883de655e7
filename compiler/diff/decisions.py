"""Comparing decisions by the pass that made them and what they are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.diff.changes import Change
from tapeout.compiler.views.plan_file import Plan

Decision = Mapping[str, Any]


def compare_decisions(before: Plan, after: Plan) -> list[Change]:
    """Choices that changed with the new reason, decisions added and removed, and those whose grounds changed."""
    old, new = _keyed(before), _keyed(after)
    changes: list[Change] = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key, []), new.get(key, [])
        if a == b:
            continue
        subject = f"{key[0]} {key[1]}"
        was, now = _choices(a), _choices(b)
        if was == now:
            changes.append(Change("decisions", subject, effect=f"{was} as before, but {_grounds(a, b)} changed"))
        else:
            changes.append(Change("decisions", subject, was, now, f"because {b[0]['reason']}" if b else ""))
    return changes


def _keyed(plan: Plan) -> dict[tuple[str, str], list[Decision]]:
    keyed: dict[tuple[str, str], list[Decision]] = {}
    for decision in plan["decisions"]:
        keyed.setdefault((decision["pass"], decision["subject"]), []).append(decision)
    return keyed


def _choices(decisions: list[Decision]) -> str | None:
    return " / ".join(dict.fromkeys(decision["choice"] for decision in decisions)) or None


def _grounds(old: list[Decision], new: list[Decision]) -> str:
    names = ("reason", "alternatives", "evidence")
    changed = [name for name in names if [d.get(name) for d in old] != [d.get(name) for d in new]]
    return ", ".join(changed) or "its details"
