"""Memory of each rank as the segments of a bar: weights by kind, the KV pool by cache, arena, scratch; what is free."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tapeout.compiler.views.kinds import KINDS, bytes_by_kind
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.text import change_of_size, size, wildcard

_SHADES = 6
"""Shades of a hue that the style sheet has."""
_VISIBLE = 10
"""A bar has the length of what a rank may take where at least one part in so many is taken."""


@dataclass(frozen=True)
class Segment:
    """A part of a rank's memory. ``hue`` and ``shade`` choose its colour: one hue for weights, one for the pool."""

    label: str
    bytes: int
    hue: str
    shade: int = 0


@dataclass(frozen=True)
class Rank:
    """What one rank holds, and what it may take with the driver's context (0 where the plan does not say)."""

    name: str
    segments: tuple[Segment, ...]
    total: int
    capacity: int

    @property
    def free(self) -> int:
        """What it may take and does not."""
        return max(self.capacity - self.total, 0)

    def parts(self) -> str:
        """The sum in words: ``weights 92.2 MiB, KV pool 45.0 MiB, …``."""
        taken: Counter[str] = Counter()
        for segment in self.segments:
            taken[segment.label.partition(":")[0]] += segment.bytes
        return ", ".join(f"{name} {size(count)}" for name, count in taken.items())

    def bytes_of(self, label: str) -> int:
        """Bytes of a segment; 0 if the rank has none of that label."""
        return sum(segment.bytes for segment in self.segments if segment.label == label)


@dataclass(frozen=True)
class Row:
    """A line of the table below the bars: a segment's label, its bytes on every rank, and what changed."""

    segment: Segment
    bytes: tuple[int, ...]
    change: str


def ranks(plan: Plan) -> list[Rank]:
    """The memory of every rank, equal ones together. All ranks of a plan hold as much today."""
    memory = plan["memory"]
    parts = ("weights", "kv_pool", "arena", "scratch")
    segments = (
        *_weights(plan),
        *_caches(plan),
        Segment("arena", memory["arena"], "arena"),
        Segment("scratch", memory["scratch"], "scratch"),
        Segment("communication", memory["total"] - sum(memory[part] for part in parts), "comm"),
        Segment("context of the driver", memory.get("context", 0), "context"),
    )
    kept = tuple(segment for segment in segments if segment.bytes)
    count = plan["spec"]["topology"]["count"]
    name = "rank 0" if count == 1 else f"each of ranks 0-{count - 1}"
    context = memory.get("context", 0)
    capacity = memory["capacity"] + context if memory["capacity"] else 0
    return [Rank(name, kept, memory["total"] + context, capacity)]


def coloured(of_plans: list[list[Rank]]) -> list[list[Rank]]:
    """The ranks of all plans, with one shade for a cache that several plans have."""
    everyone = [segment for of_plan in of_plans for rank in of_plan for segment in rank.segments]
    labels = list(dict.fromkeys(segment.label for segment in everyone if segment.hue == "kv"))
    shades = {label: min(shade, _SHADES - 1) for shade, label in enumerate(labels)}
    return [[replace(rank, segments=_shaded(rank, shades)) for rank in of_plan] for of_plan in of_plans]


def _shaded(rank: Rank, shades: dict[str, int]) -> tuple[Segment, ...]:
    return tuple(replace(segment, shade=shades.get(segment.label, segment.shade)) for segment in rank.segments)


def length(columns: list[Rank]) -> int:
    """Bytes that a whole bar stands for: what a rank may take, or where little of that is taken, what it takes."""
    taken, whole = (max(getattr(rank, name) for rank in columns) for name in ("total", "capacity"))
    return whole if whole <= taken * _VISIBLE else taken or 1


def rows(columns: list[Rank], *, compare: bool) -> list[Row]:
    """A row for every label that a rank has. ``compare`` adds what changed from the first rank to the second."""
    labels = {segment.label: segment for rank in columns for segment in rank.segments}
    found: list[Row] = []
    for label, segment in labels.items():
        counts = tuple(rank.bytes_of(label) for rank in columns)
        found.append(Row(segment, counts, change(counts) if compare else ""))
    return found


def change(counts: tuple[int, ...]) -> str:
    """From the first to the second; nothing where they are equal."""
    return change_of_size(counts[0], counts[1]) if counts[0] != counts[1] else ""


def _weights(plan: Plan) -> list[Segment]:
    taken = bytes_by_kind(plan)
    segments = [Segment(f"weights: {kind}", taken.get(kind, 0), "weights", shade) for shade, kind in enumerate(KINDS)]
    rest = plan["memory"]["weights"] - sum(taken.values())
    return [*segments, Segment("weights: alignment", rest, "weights", _SHADES - 1)]


def _caches(plan: Plan) -> list[Segment]:
    """The pool by kind of cache; layers share one. A plan of before caches were listed has one segment."""
    memory = plan["memory"]
    kv, taken = memory["kv"], Counter[str]()
    for cache in kv.get("caches", ()):
        held = cache["page_bytes"] * kv["pages"] + cache["sequence_bytes"] * memory["max_sequences"]
        taken[wildcard(cache["name"])] += held
    taken["alignment" if taken else "all layers"] += memory["kv_pool"] - taken.total()
    return [Segment(f"KV pool: {name}", held, "kv") for name, held in taken.items()]
