"""Comparing what ranks hand to one another, list by list."""

from __future__ import annotations

from typing import Any

from tapeout.compiler.diff.changes import Change
from tapeout.compiler.views.inspect import link_text
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.text import microseconds

Collectives = dict[str, Plan]
"""The collectives of a list: by kind, and the second of a kind with its number."""


def compare_communication(before: Plan, after: Plan) -> list[Change]:
    """The link that times are predicted for, collectives that changed, and those of lists added and removed."""
    old, new = (plan.get("communication", {}) for plan in (before, after))
    pairs = [("ranks", _text(old.get("ranks")), _text(new.get("ranks"))), ("link", _link(old), _link(new))]
    changes = [Change("communication", name, a, b) for name, a, b in pairs if a != b]
    was, now = _lists(old), _lists(new)
    common = [name for name in was if name in now]
    changes += _changed(was, now, common)
    changes += [Change("communication", name, _whole(was[name]), None) for name in was if name not in now]
    return changes + [Change("communication", name, None, _whole(now[name])) for name in now if name not in was]


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _link(communication: Plan) -> str | None:
    return link_text(communication["link"]) if "link" in communication else None


def _lists(communication: Plan) -> dict[str, Collectives]:
    found: dict[str, Collectives] = {}
    for entry in communication.get("lists", ()):
        collectives = found.setdefault(f"{entry['phase']}.{entry['rows']}", {})
        for made in entry["collectives"]:
            seen = sum(made["kind"] == other["kind"] for other in collectives.values())
            collectives[f"{made['kind']} {seen + 1}" if seen else made["kind"]] = made
    return {name: collectives for name, collectives in found.items() if collectives}


def _changed(was: dict[str, Collectives], now: dict[str, Collectives], common: list[str]) -> list[Change]:
    """What changed alike in several lists is one change, of "all" of them where no list is left out."""
    where: dict[tuple[str, str | None, str | None, str], list[str]] = {}
    for name in common:
        for kind in dict.fromkeys([*was[name], *now[name]]):
            a, b = was[name].get(kind), now[name].get(kind)
            if a != b:
                where.setdefault((kind, *_pair(a, b), _effect(a, b)), []).append(name)
    holders = {kind: sum(kind in was[name] or kind in now[name] for name in common) for kind, *_ in where}
    return [
        Change("communication", kind if len(names) == holders[kind] else f"{', '.join(names)} {kind}", a, b, effect)
        for (kind, a, b, effect), names in where.items()
    ]


def _pair(old: Plan | None, new: Plan | None) -> tuple[str | None, str | None]:
    """In words; of a collective that both lists have, only what differs."""
    if old is None or new is None:
        return (None, _whole({"": new})) if new else (_whole({"": old or {}}), None)
    parts = [(a, b) for a, b in zip(_words(old), _words(new), strict=True) if a != b]
    return ", ".join(a for a, _ in parts), ", ".join(b for _, b in parts)


def _words(made: Plan) -> tuple[str, ...]:
    us = "no time" if made.get("us") is None else f"{microseconds(made['us'])} each"
    return (
        made["kind"],
        f"{made['count']:,} times",
        f"{made['columns']:,} columns",
        f"{made['bytes']:,} bytes",
        made["algorithm"],
        us,
    )


def _effect(old: Plan | None, new: Plan | None) -> str:
    """How many microseconds more or less all of them take."""
    times = [made["count"] * made["us"] if made and made.get("us") is not None else None for made in (old, new)]
    if old is None or new is None or times[0] is None or times[1] is None or times[0] == times[1]:
        return ""
    sign = "+" if times[1] > times[0] else "-"
    return f"{sign}{microseconds(abs(times[1] - times[0]))} a step"


def _whole(collectives: Collectives) -> str:
    told = [f"{made['count']:,} {made['kind']} of {made['bytes']:,} bytes" for made in collectives.values()]
    times = [made["count"] * made["us"] for made in collectives.values() if made.get("us") is not None]
    return ", ".join(told) + (f", {microseconds(sum(times))}" if times else "")
