"""Where each weight went; layers whose weights differ only in their number are one entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapeout.compiler.recipes_table import NestedRecipes
from tapeout.compiler.views.kinds import kind_of
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.recipes import Descriptions, Step, by_rank, shape_text
from tapeout.compiler.views.text import indices, ranges, wildcard


@dataclass(frozen=True)
class WeightGroup:
    """Weights that differ in their number alone. ``bytes`` is of all; ``each``, of the smallest and largest."""

    name: str
    numbers: str
    kind: str
    shape: str
    format: str
    layout: str
    axes: str
    error: str
    bytes: int
    each: tuple[int, int]
    recipes: tuple[tuple[str, Step], ...]
    """The recipe, with the ranks it is for where there are several."""
    places: tuple[tuple[str, int, int], ...]
    """Layer, offset and bytes of each."""


def weight_groups(plan: Plan) -> list[WeightGroup]:
    """All weights in the order of the file, by the first of each group."""
    groups: dict[tuple[str, str, str, str, tuple[Step, ...]], list[Plan]] = {}
    nested, descriptions = NestedRecipes(plan), Descriptions()
    for weight in plan["weights"]:
        numbers = indices(weight["name"])
        layer = numbers[0] if numbers else None
        steps = tuple(descriptions.of(recipe, layer) for recipe in nested.of(weight))
        key = (wildcard(weight["name"]), shape_text(weight["shape"]), weight["format"], weight["layout"], steps)
        groups.setdefault(key, []).append(weight)
    return [_group(key[0], key[4], members) for key, members in groups.items()]


def _group(name: str, steps: tuple[Step, ...], members: list[Plan]) -> WeightGroup:
    first = members[0]
    counts = [weight["bytes"] for weight in members]
    numbers = [indices(weight["name"]) for weight in members]
    return WeightGroup(
        name=name if len(members) > 1 else first["name"],
        numbers=ranges(found[0] for found in numbers if found) if len(members) > 1 else "",
        kind=kind_of(first),
        shape=shape_text(first["shape"]),
        format=first["format"],
        layout=first["layout"],
        axes=", ".join(first.get("axes") or ()),
        error=_worst(members),
        bytes=sum(counts),
        each=(min(counts), max(counts)),
        recipes=_recipes(steps),
        places=tuple(
            (".".join(map(str, found)), weight["offset"], weight["bytes"])
            for found, weight in zip(numbers, members, strict=True)
        ),
    )


def _recipes(steps: Sequence[Step]) -> tuple[tuple[str, Step], ...]:
    found = by_rank(dict(enumerate(steps)))
    return tuple((ranks if len(steps) > 1 else "", each) for ranks, each in found)


def _worst(members: Sequence[Plan]) -> str:
    errors = [weight["error"] for weight in members if weight.get("error")]
    if not errors:
        return ""
    rms, most = (max(error[key] for error in errors) for key in ("relative_rms", "max_abs"))
    return f"relative RMS error {rms:.3g}, largest {most:.3g}"
