"""A weight's recipe in words, with inputs that differ only in a number told once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from tapeout.compiler.guards import is_list, is_mapping
from tapeout.compiler.recipes_table import Numbered
from tapeout.compiler.views.text import indices, ranges

Recipe = Mapping[str, Any]
ALIKE = "#"
"""Stands for the number in which inputs differ that are told once."""
SOURCES = {"read": "tensor", "planned": "slot"}
"""Steps without inputs that name something, and the field with the name."""


@dataclass(frozen=True)
class Step:
    """One operation and what it reads. ``role`` names an input where an operation has several kinds of them.

    ``times`` inputs of the step above look like this one, but for the ``numbers`` that ``ALIKE`` stands for.
    """

    text: str
    tensor: str
    detail: str
    role: str
    below: tuple[Step, ...] = ()
    times: int = 1
    numbers: str = ""


_WORDS = {
    "concat": "concatenate {parts} parts, in this order",
    "pack": "lay out as {layout}",
    "unpack": "unpack {packing} into {to}",
    "convert": "convert to {to}",
    "rows": "rows {start} to {stop}",
    "columns": "columns {start} to {stop}",
    "group_rows": "rows {start} to {stop} of every {period}",
    "pad_rows": "every {period} rows filled up with zeros to {padded}",
    "pad_columns": "every {period} columns filled up with zeros to {padded}",
    "halves_from_pairs": "reorder rotary pairs into halves, {heads} heads",
    "interleave": "interleave {parts} parts, each in {groups} groups of rows",
    "flatten": "matrices of a stack, one below the other",
    "transpose_groups": "transpose each of {groups} groups of rows",
    "vector": "as one vector, row after row",
    "integers": "whole numbers below {limit} as f32",
}


class Descriptions:
    """Describes recipes; one that several weights or ranks share, as nested recipes of a plan do, is described once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int | None, str], tuple[Step, Recipe]] = {}

    def of(self, recipe: Recipe, layer: int | None = None, role: str = "") -> Step:
        """The steps of a recipe, outermost first. The number of ``layer`` in tensor names becomes ``*``."""
        key = (id(recipe), layer, role)
        if key not in self._made:  # it holds the recipe too, so that no other gets its identity
            self._made[key] = (self._step(recipe, layer, role), recipe)
        return self._made[key][0]

    def _step(self, recipe: Recipe, layer: int | None, role: str) -> Step:
        if recipe["op"] in SOURCES:
            detail = f"{shape_text(recipe['shape'])} {recipe['format']}"
            return Step(recipe["op"], _without_layer(recipe[SOURCES[recipe["op"]]], layer), detail, role)
        parts: Any = recipe.get("parts")
        below = self._alike(parts, layer) if isinstance(parts, Numbered) else None
        if below is None:
            below = _folded([self.of(child, layer, name) for name, child in _named(recipe)])
        return Step(_words(recipe), "", "", role, below)

    def _alike(self, parts: Numbered, layer: int | None) -> tuple[Step, ...] | None:
        """What ``_folded`` makes of a template, from its first and last part; None where their numbers are not it."""
        first, last = (self.of(part, layer) for part in (parts[0], parts[-1]))
        start, stop = _number(first), _number(last)
        if start is None or stop is None or stop - start != len(parts) - 1 or len(parts) < 2:
            return None
        return (replace(_general(first), times=len(parts), numbers=ranges(range(start, stop + 1))),)


def describe(recipe: Recipe, layer: int | None = None) -> Step:
    """One recipe, described on its own."""
    return Descriptions().of(recipe, layer)


def shape_text(shape: Sequence[int]) -> str:
    """``49152×576``."""
    return "×".join(str(size) for size in shape)


def _named(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """Inputs with the names of their fields; a list and an only input need none."""
    fields: list[tuple[str, Recipe]] = [
        (name.replace("_", " "), value) for name, value in recipe.items() if is_mapping(value) and "op" in value
    ]
    return fields if len(fields) > 1 else [("", child) for child in inputs(recipe)]


def _words(recipe: Recipe) -> str:
    """A step as a sentence without its inputs; one that a damaged plan makes up shows its fields."""
    try:
        words = _WORDS.get(recipe["op"], "").format_map({**recipe, "parts": len(recipe.get("parts", ()))})
    except KeyError:
        words = ""
    if recipe["op"] == "constant":
        return f"{len(recipe.get('values') or ())} numbers that follow from the config"
    return words or step(recipe)


def _without_layer(tensor: str, layer: int | None) -> str:
    """The first number of a name as ``*``, if it is the layer's."""
    if layer is None or indices(tensor)[:1] != (layer,):
        return tensor
    return f"{tensor}.".replace(f".{layer}.", ".*.", 1)[:-1]


def _folded(steps: list[Step]) -> tuple[Step, ...]:
    """Neighbours that differ by one number are told once, if their numbers ascend, so that no order is lost."""
    folded: list[Step] = []
    for general, group in groupby(steps, key=_general) if len(steps) > 1 else ():
        members = list(group)
        numbers = [_number(member) for member in members]
        if len(members) > 1 and all(a is not None and b is not None and a < b for a, b in pairwise(numbers)):
            told = ranges(number for number in numbers if number is not None)
            folded.append(replace(general, times=len(members), numbers=told))
        else:
            folded += members
    return tuple(folded or steps)


def _general(one: Step) -> Step:
    return replace(one, tensor=_without_last(one.tensor), below=tuple(map(_general, one.below)))


def _without_last(tensor: str) -> str:
    """The last number of a name, which is the expert's, as ``ALIKE``."""
    numbers = indices(tensor)
    before, _, after = f"{tensor}.".rpartition(f".{numbers[-1]}.") if numbers else ("", "", "")
    return f"{before}.{ALIKE}.{after}"[:-1] if numbers else tensor


def _number(one: Step) -> int | None:
    """The last number of every tensor name at or below a step; None where they differ, or some are told once."""
    found = set(_last_numbers(one))
    return next(iter(found)) if len(found) == 1 else None


def _last_numbers(one: Step) -> Iterator[int | None]:
    if one.times > 1:
        yield None
    if one.tensor:
        yield (indices(one.tensor) or (None,))[-1]
    for step in one.below:
        yield from _last_numbers(step)


def by_rank(steps: Mapping[int, Step]) -> list[tuple[str, Step]]:
    """Ranks whose recipes are equal (they hold the same) together: ``ranks 0-3``, by number."""
    of_steps: dict[Step, list[int]] = {}
    for rank, each in steps.items():
        of_steps.setdefault(each, []).append(rank)
    return [(f"{'rank' if len(same) == 1 else 'ranks'} {ranges(same)}", each) for each, same in of_steps.items()]


def inputs(recipe: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The recipes that a recipe reads, in order."""
    found: list[Mapping[str, Any]] = []
    for value in recipe.values():
        found += [item for item in (value if is_list(value) else [value]) if _is_recipe(item)]
    return found


def _is_recipe(value: Any) -> bool:
    return is_mapping(value) and "op" in value


def fields(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a step says besides its inputs."""
    own = {name: value for name, value in recipe.items() if name != "op" and not (value is None or _is_recipe(value))}
    return {name: value for name, value in own.items() if not (is_list(value) and any(map(_is_recipe, value)))}


def step(recipe: Mapping[str, Any]) -> str:
    """One step in words: its op and fields."""
    if recipe["op"] in SOURCES:
        return f"{recipe['op']} {recipe[SOURCES[recipe['op']]]} {recipe['shape']} {recipe['format']}"
    shown = [f"{name} {short(value)}" for name, value in fields(recipe).items()]
    return " ".join([recipe["op"].replace("_", " "), *shown])


def short(value: Any) -> str:
    """A value, cut to fit a line."""
    text = str(value)
    return text if len(text) <= 48 else text[:45] + "..."
