"""Comparing weights: formats, layouts, sizes, and the step at which a recipe departs."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from tapeout.compiler.diff.changes import Change, grouped
from tapeout.compiler.guards import is_list
from tapeout.compiler.recipes_table import NestedRecipes
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.recipes import SOURCES, fields, inputs, short, step
from tapeout.compiler.views.text import change_of_size, group_label, size, wildcard

Recipe = dict[str, Any]
_MOST_STEPS = 3


def compare_weights(before: Plan, after: Plan) -> list[Change]:
    """Weights added, removed, or stored otherwise, grouped over layers."""
    old, new = _by_name(before), _by_name(after)
    names = list(dict.fromkeys([*old, *new]))
    found = {name: _stored_pair(old.get(name), new.get(name)) for name in names}
    changed = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    changes: list[Change] = []
    for change, group in grouped("weights", changed, names):
        a, b = _total(old, group), _total(new, group)
        changes.append(replace(change, effect=_growth(a, b), bytes=b - a))
    common = [name for name in old if name in new]
    return changes + _details(old, new, common)


def _by_name(plan: Plan) -> dict[str, Plan]:
    return {weight["name"]: weight for weight in plan["weights"]}


def _stored(weight: Plan) -> list[str]:
    return [weight["format"], "×".join(map(str, weight["shape"])), weight["layout"]]


def _stored_pair(old: Plan | None, new: Plan | None) -> tuple[str | None, str | None]:
    """Format, shape and layout; of a weight that both plans have, only those that differ."""
    if old is None or new is None:
        return tuple(None if weight is None else " ".join(_stored(weight)) for weight in (old, new))  # pyright: ignore[reportReturnType]
    pairs = [(a, b) for a, b in zip(_stored(old), _stored(new), strict=True) if a != b]
    return " ".join(a for a, _ in pairs), " ".join(b for _, b in pairs)


def _total(weights: dict[str, Plan], names: list[str]) -> int:
    return sum(weights[name]["bytes"] for name in names if name in weights)


def _growth(before: int, after: int) -> str:
    if before == after:
        return "same size"
    return change_of_size(before, after) if before and after else size(max(before, after))


def _details(old: dict[str, Plan], new: dict[str, Plan], common: list[str]) -> list[Change]:
    changes: list[Change] = []
    for key in ("bytes", "axes"):
        found = {
            name: (str(old[name].get(key)), str(new[name].get(key)))
            for name in common
            if old[name].get(key) != new[name].get(key) and (key != "bytes" or _stored(old[name]) == _stored(new[name]))
        }
        named = grouped("weights", found, old)
        changes += [replace(change, subject=f"{change.subject} {key}") for change, _ in named]
    changes += _errors(old, new, common)
    moved = sum(old[name]["offset"] != new[name]["offset"] for name in common)
    if moved:
        subject = f"{moved} of {len(common)} kept weights"
        changes.append(Change("weights", subject, effect="lie at other offsets in the file"))
    return changes


def _errors(old: dict[str, Plan], new: dict[str, Plan], common: list[str]) -> list[Change]:
    """Errors of conversion, the worst of each group, since every layer has its own."""
    groups: dict[str, list[str]] = {}
    for name in common:
        if old[name].get("error") != new[name].get("error"):
            groups.setdefault(wildcard(name), []).append(name)
    return [
        Change("weights", f"{group_label(names, old)} error", _worst(old, names), _worst(new, names))
        for names in groups.values()
    ]


def _worst(weights: dict[str, Plan], names: list[str]) -> str | None:
    errors = [weights[name]["error"] for name in names if weights[name].get("error")]
    keys = list(dict.fromkeys(key for error in errors for key in error))
    figures = [f"{key} {max(error.get(key, 0.0) for error in errors):.3g}" for key in keys]
    return "at most " + ", ".join(figures) if figures else None


def compare_recipes(before: Plan, after: Plan) -> list[Change]:
    """For each weight that both plans have, the steps at which its recipe departs, on the first rank where it does.

    Weights that merely have more ranks, or fewer, are one change.
    """
    old, new = recipes_by_name(before), recipes_by_name(after)
    found: dict[str, tuple[str | None, str | None]] = {}
    ranks: dict[tuple[int, int], int] = {}
    for name in (name for name in old if name in new and old[name] != new[name]):
        departure = _departure(old[name], new[name])
        if departure is None:
            counts = (len(old[name]), len(new[name]))
            ranks[counts] = ranks.get(counts, 0) + 1
        else:
            found[name] = (None, departure)
    changes = [Change("recipes", c.subject, effect=c.after or "") for c, _ in grouped("recipes", found, old)]
    return changes + [
        Change("recipes", f"{count} of {len(old)} weights", effect=f"for {a} → {b} ranks, on each as before")
        for (a, b), count in ranks.items()
    ]


def recipes_by_name(plan: Plan) -> dict[str, list[Recipe]]:
    """The nested recipes of every weight, one a rank: what they say, wherever it stands in the plan's table."""
    nested = NestedRecipes(plan)
    return {weight["name"]: nested.of(weight) for weight in plan["weights"]}


def _departure(old: list[Recipe], new: list[Recipe]) -> str | None:
    """In words; None where all ranks that both have hold the same."""
    differing = [rank for rank, (ours, theirs) in enumerate(zip(old, new, strict=False)) if ours != theirs]
    if not differing:
        return None
    rank = differing[0]
    steps = list(dict.fromkeys(departures(old[rank], new[rank])))
    more = f" (and {len(steps) - _MOST_STEPS} more)" if len(steps) > _MOST_STEPS else ""
    return (f"on rank {rank}: " if rank else "") + "; ".join(steps[:_MOST_STEPS]) + more


def departures(old: Recipe, new: Recipe) -> list[str]:
    """In words, the outermost steps in which two recipes differ; layer numbers are left out."""
    if old == new:
        return []
    if old["op"] != new["op"]:
        return [_exchange(old, new)]
    if old["op"] in SOURCES:
        return [f"{_name(old)} → {_name(new)}"]
    ours, theirs = fields(old), fields(new)
    changed = [
        f"{old['op']}: {key} {_difference(ours.get(key), theirs.get(key))}"
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key)
    ]
    return changed + _departures_below(old, new)


def _difference(old: Any, new: Any) -> str:
    if is_list(old) and is_list(new) and len(old) == len(new):
        where = [index for index in range(len(old)) if old[index] != new[index]]
        return f"[{where[0]}] {old[where[0]]} → {new[where[0]]}, {len(where)} of {len(old)} differ"
    return f"{short(old)} → {short(new)}"


def _departures_below(old: Recipe, new: Recipe) -> list[str]:
    below, above = list(inputs(old)), list(inputs(new))
    if len(below) == len(above) and sorted(map(repr, below)) == sorted(map(repr, above)) and below != above:
        a, b = _names(below), _names(above)
        return [f"{old['op']}: {f'order {a} → {b}' if a != b else f'{len(below)} parts in another order'}"]
    if len(below) != len(above):
        return [f"{old['op']}: parts {_names(below)} → {_names(above)}"]
    return [line for a, b in zip(below, above, strict=True) for line in departures(dict(a), dict(b))]


def _exchange(old: Recipe, new: Recipe) -> str:
    if old in inputs(new):
        return f"inserted: {_name(new)}, over {_name(old)}"
    if new in inputs(old):
        return f"removed: {_name(old)}, over {_name(new)}"
    return f"{_name(old)} → {_name(new)}"


def _leaf(recipe: Recipe) -> str:
    below = inputs(recipe)
    if recipe["op"] in SOURCES:
        return wildcard(recipe[SOURCES[recipe["op"]]])
    return _leaf(dict(below[0])) if below else recipe["op"]


def _names(recipes: list[Any]) -> str:
    runs = ((name, len(list(same))) for name, same in groupby(_leaf(dict(recipe)) for recipe in recipes))
    return "[" + ", ".join(f"{count:,} × {name}" if count > 1 else name for name, count in runs) + "]"


def _name(recipe: Recipe) -> str:
    return wildcard_words(step(recipe)) if recipe["op"] != "concat" else f"concat of {_names(list(inputs(recipe)))}"


def wildcard_words(text: str) -> str:
    """A step's text with layer numbers taken out of its tensor name."""
    return " ".join(wildcard(word) for word in text.split(" "))
