"""A weight's recipe in words, with inputs that differ only in a number told once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from tapeout.compiler.guards import is_mapping
from tapeout.compiler.views.text import indices, ranges, wildcard
from tapeout.compiler.views.weights import NAMED, inputs, step

Recipe = Mapping[str, Any]
ALIKE = "#"
"""Stands for the number in which inputs differ that are told once."""


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


def describe(recipe: Recipe, layer: int | None = None, role: str = "") -> Step:
    """The steps of a recipe, outermost first. The number of ``layer`` in tensor names becomes ``*``."""
    if recipe["op"] in NAMED:
        detail = f"{shape_text(recipe['shape'])} {recipe['format']}"
        return Step(recipe["op"], _without_layer(recipe[NAMED[recipe["op"]]], layer), detail, role)
    below = _folded([describe(child, layer, name) for name, child in _named(recipe)])
    return Step(_words(recipe), "", "", role, below)


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
    known = {
        "concat": f"concatenate {len(recipe.get('parts', ()))} parts, in this order",
        "pack": f"lay out as {recipe.get('layout')}",
        "unpack": f"unpack {recipe.get('packing')} into {recipe.get('to')}",
        "convert": f"convert to {recipe.get('to')}",
        "rows": f"rows {recipe.get('start')} to {recipe.get('stop')}",
        "columns": f"columns {recipe.get('start')} to {recipe.get('stop')}",
        "halves_from_pairs": f"reorder rotary pairs into halves, {recipe.get('heads')} heads",
        "interleave": "interleave the rows of both",
        "constant": f"{len(recipe.get('values') or ())} numbers that follow from the config",
    }
    return known.get(recipe["op"]) or step(recipe)


def _without_layer(tensor: str, layer: int | None) -> str:
    """The first number of a name as ``*``, if it is the layer's."""
    if layer is None or indices(tensor)[:1] != (layer,):
        return tensor
    return f"{tensor}.".replace(f".{layer}.", ".*.", 1)[:-1]


def _folded(steps: list[Step]) -> tuple[Step, ...]:
    if len(steps) < 2:
        return tuple(steps)
    folded: list[Step] = []
    for general, group in groupby(steps, key=_general):
        members = list(group)
        numbers = ranges(number for member in members for number in _numbers(member)[-1:])
        folded.append(replace(general, times=len(members), numbers=numbers) if len(members) > 1 else members[0])
    return tuple(folded)


def _general(one: Step) -> Step:
    return replace(one, tensor=wildcard(one.tensor, ALIKE), below=tuple(map(_general, one.below)))


def _numbers(one: Step) -> tuple[int, ...]:
    """The numbers in the first tensor name of a step."""
    return indices(one.tensor) if one.tensor else next((found for step in one.below if (found := _numbers(step))), ())
