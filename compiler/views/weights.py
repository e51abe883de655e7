"""``inspect --weight``: where the bytes of a weight come from."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from tapeout.compiler.guards import is_list, is_mapping
from tapeout.compiler.recipes_table import NestedRecipes
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.tables import console
from tapeout.compiler.views.text import size
from tapeout.runtime.errors import TapeoutError


def print_weights(plan: Plan, pattern: str, out: Console | None = None, *, rank: int = 0) -> None:
    """The recipe, on a rank, of every weight that ``pattern`` (a glob) names. Raises TapeoutError for none."""
    out = out or console()
    names = [weight["name"] for weight in plan["weights"]]
    found = [weight for weight in plan["weights"] if fnmatchcase(weight["name"], pattern)]
    if not found:
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
        raise TapeoutError(f"no weight is called {pattern}; close: {', '.join(close)}")
    nested = NestedRecipes(plan)
    for weight in found:
        recipes = nested.of(weight)
        if not 0 <= rank < len(recipes):
            raise TapeoutError(f"--rank {rank}: the plan has {len(recipes)} ranks, numbered from 0")
        out.print(_tree(weight, recipes[rank]))


def _tree(weight: Plan, recipe: Plan) -> Tree:
    place = f"{weight['bytes']:,} bytes ({size(weight['bytes'])}) at {weight['offset']:,}"
    tree = Tree(Text(f"{weight['name']}  {weight['shape']} {weight['format']}, {weight['layout']}, {place}"))
    if weight.get("axes"):
        tree.add(Text("axes: " + ", ".join(map(str, weight["axes"])), style="dim"))
    if weight.get("error"):
        figures = ", ".join(f"{name} {value:.3g}" for name, value in weight["error"].items())
        tree.add(Text(f"error: {figures}", style="dim"))
    _grow(tree, recipe)
    return tree


def _grow(tree: Tree, recipe: Mapping[str, Any]) -> None:
    branch = tree.add(Text(step(recipe)))
    for child in inputs(recipe):
        _grow(branch, child)


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


NAMED = {"read": "tensor", "planned": "slot"}
"""The steps that recipes begin with, and the field that says where."""


def step(recipe: Mapping[str, Any]) -> str:
    """One step in words: its op and fields."""
    if recipe["op"] in NAMED:
        return f"{recipe['op']} {recipe[NAMED[recipe['op']]]} {recipe['shape']} {recipe['format']}"
    shown = [f"{name} {short(value)}" for name, value in fields(recipe).items()]
    return " ".join([recipe["op"].replace("_", " "), *shown])


def short(value: Any) -> str:
    """A value, cut to fit a line."""
    text = str(value)
    return text if len(text) <= 48 else text[:45] + "..."
