"""Comparing memory: components, the KV pool's shape, and the arena's buffers."""

from __future__ import annotations

from tapeout.compiler.diff.changes import Change
from tapeout.compiler.diff.values import compare_values
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.text import change_of_size, size, wildcard

_SHOWN_BUFFERS = 4
_SIZES = ("weights", "kv_pool", "arena", "scratch", "total", "capacity")


def compare_memory(before: Plan, after: Plan) -> list[Change]:
    """Each component with how much it moved."""
    old, new = before["memory"], after["memory"]
    changes = _sizes(old, new)
    changes += compare_values("memory", _without_sizes(old), _without_sizes(new))
    changes += _caches(old["kv"].get("caches", []), new["kv"].get("caches", []))
    return changes + _buffers(old.get("buffers", []), new.get("buffers", []))


def _without_sizes(memory: Plan) -> Plan:
    kv = {key: value for key, value in memory["kv"].items() if key != "caches"}
    return {key: value for key, value in memory.items() if key not in _SIZES and key != "buffers"} | {"kv": kv}


def _caches(old: list[Plan], new: list[Plan]) -> list[Change]:
    """Regions of the KV pool by their names; where they start follows from their sizes."""
    sizes = ("page_bytes", "sequence_bytes")
    was, now = ({cache["name"]: [cache[key] for key in sizes] for cache in caches} for caches in (old, new))
    counts = (
        ("caches added", [name for name in now if name not in was]),
        ("caches removed", [name for name in was if name not in now]),
        ("caches resized", [name for name in was if name in now and was[name] != now[name]]),
    )
    return [Change("memory", label, effect=_listed([("the KV pool", name) for name in names]))
            for label, names in counts if names]  # fmt: skip


def _sizes(old: Plan, new: Plan) -> list[Change]:
    return [
        Change("memory", key, size(a), size(b), change_of_size(a, b), b - a)
        for key, a, b in ((key, old[key], new[key]) for key in _SIZES)
        if a != b
    ]


def _buffers(old: list[Plan], new: list[Plan]) -> list[Change]:
    """Buffers of launch lists that both plans have; a new list's own buffers come with the list."""
    both = {buffer["graph"] for buffer in old} & {buffer["graph"] for buffer in new}
    was = {(buffer["graph"], buffer["name"]): buffer for buffer in old if buffer["graph"] in both}
    now = {(buffer["graph"], buffer["name"]): buffer for buffer in new if buffer["graph"] in both}
    kept = [key for key in was if key in now]
    resized = [key for key in kept if was[key]["bytes"] != now[key]["bytes"]]
    moved = [key for key in kept if was[key]["offset"] != now[key]["offset"]]
    lives = [key for key in kept if _life(was[key]) != _life(now[key])]
    counts = (
        ("buffers added", [key for key in now if key not in was]),
        ("buffers removed", [key for key in was if key not in now]),
        ("buffers resized", resized),
        ("buffers moved", moved),
        ("buffers with another lifetime", lives),
    )
    return [Change("memory", label, effect=_listed(keys)) for label, keys in counts if keys]


def _life(buffer: Plan) -> tuple[int, int]:
    return buffer["first"], buffer["last"]


def _listed(keys: list[tuple[str, str]]) -> str:
    if len(keys) == 1:
        return f"1: {keys[0][1]} in {keys[0][0]}"
    names = list(dict.fromkeys(wildcard(name) for _, name in keys))
    return f"{len(keys)}: {', '.join(names[:_SHOWN_BUFFERS])}{', ...' if len(names) > _SHOWN_BUFFERS else ''}"
