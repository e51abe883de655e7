"""Comparing decisions by the pass that made them and what they are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.diff.changes import Change
from tapeout.compiler.views.plan_file import Plan

Decision = Mapping[str, Any]
_SHOWN = 3


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
            changes.append(Change("decisions", subject, was, now, _new_reason(a, b)))
    return changes


def _keyed(plan: Plan) -> dict[tuple[str, str], list[Decision]]:
    keyed: dict[tuple[str, str], list[Decision]] = {}
    for decision in plan["decisions"]:
        keyed.setdefault((decision["pass"], decision["subject"]), []).append(decision)
    return keyed


def _choices(decisions: list[Decision]) -> str | None:
    return " / ".join(dict.fromkeys(decision["choice"] for decision in decisions)) or None


def _new_reason(old: list[Decision], new: list[Decision]) -> str:
    known = {decision["reason"] for decision in old}
    reason = next((decision["reason"] for decision in new), None)
    return "" if reason is None or reason in known else f"because {reason}"


def _grounds(old: list[Decision], new: list[Decision]) -> str:
    names = [name for name in ("reason", "alternatives") if _all(old, name) != _all(new, name)]
    if _all(old, "evidence") != _all(new, "evidence"):
        names.append("evidence" + _figures(old, new))
    return ", ".join(names) or "its details"


def _all(decisions: list[Decision], name: str) -> list[Any]:
    return [decision.get(name) for decision in decisions]


def _figures(old: list[Decision], new: list[Decision]) -> str:
    """The figures that changed, where one decision stands against one."""
    if len(old) != 1 or len(new) != 1:
        return ""
    a, b = old[0].get("evidence", {}), new[0].get("evidence", {})
    changed = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    shown = ", ".join(f"{name} {a.get(name, '-')} → {b.get(name, '-')}" for name in changed[:_SHOWN])
    return f" ({shown}{', ...' if len(changed) > _SHOWN else ''})"
