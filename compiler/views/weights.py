"""``inspect --weight``: which bytes of which files a weight is, and where they come from on every rank."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from tapeout.compiler.recipes_table import NestedRecipes
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.recipes import Descriptions, Step, by_rank
from tapeout.compiler.views.tables import console
from tapeout.compiler.views.text import ranges, size
from tapeout.runtime.errors import TapeoutError


def print_weights(plan: Plan, pattern: str, out: Console | None = None, *, rank: int | None = None) -> None:
    """Place and recipe of every weight that ``pattern`` (a glob) names, on one rank or, for None, on each.

    Ranks that hold the same are told together. Raises TapeoutError where there is no such weight or rank.
    """
    out = out or console()
    names = [weight["name"] for weight in plan["weights"]]
    found = [weight for weight in plan["weights"] if fnmatchcase(weight["name"], pattern)]
    if not found:
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
        raise TapeoutError(
            f"no weight is called {pattern}; close: {', '.join(close) or 'none, the plan has no weights'}"
        )
    nested, descriptions = NestedRecipes(plan), Descriptions()
    for weight in found:
        steps = [descriptions.of(recipe) for recipe in nested.of(weight)]
        if rank is not None and not 0 <= rank < len(steps):
            there_are = f"ranks 0 to {len(steps) - 1}" if steps[1:] else "rank 0 alone"
            raise TapeoutError(f"--rank {rank}: there is no such rank; the plan has {there_are}")
        out.print(_tree(weight, {each: step for each, step in enumerate(steps) if rank in (None, each)}))


def _tree(weight: Plan, steps: dict[int, Step]) -> Tree:
    taken = f"{weight['bytes']:,} bytes ({size(weight['bytes'])})"
    tree = Tree(Text(f"{weight['name']}  {weight['shape']} {weight['format']}, {weight['layout']}, {taken}"))
    end = weight["offset"] + weight["bytes"]
    tree.add(Text(f"bytes {weight['offset']:,} to {end:,} of the data in {_files(steps)}", style="dim"))
    if weight.get("axes"):
        tree.add(Text("axes: " + ", ".join(map(str, weight["axes"])), style="dim"))
    if weight.get("error"):
        figures = ", ".join(f"{name} {value:.3g}" for name, value in weight["error"].items())
        tree.add(Text(f"error: {figures}", style="dim"))
    for ranks, step in by_rank(steps):
        _grow(tree.add(Text(ranks)) if len(steps) > 1 else tree, step)
    return tree


def _files(steps: dict[int, Step]) -> str:
    if len(steps) == 1:
        return f"weights/rank{next(iter(steps))}.safetensors"
    return f"weights/rankR.safetensors, R = {ranges(steps)}"


def _grow(tree: Tree, step: Step) -> None:
    alike = f"{step.times:,} alike, # = {step.numbers}: " if step.times > 1 else ""
    named = f" {step.tensor} {step.detail}" if step.tensor else ""
    branch = tree.add(Text(f"{step.role}{' ' if step.role else ''}{alike}{step.text}{named}"))
    for below in step.below:
        _grow(branch, below)
