"""The recipes of a plan as a table: each distinct step once, its inputs by their place; see docs/plan.md.

``RecipeTable`` writes it, ``NestedRecipes`` gives the nested form of ``Recipe.to_json`` back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeGuard

from tapeout.compiler.guards import is_list, is_mapping
from tapeout.compiler.recipes import Concat, Json, Read, Recipe, is_input
from tapeout.runtime.errors import TapeoutError

FEWEST = 4
"""Parts of a concatenation that are worth a template."""
MOST = 1 << 16
"""Parts that a template may stand for, far more than there are experts; a damaged plan could ask for any number."""


LARGEST, DEEPEST = 1 << 20, 100
"""Steps of one recipe with all that stands below it, and how many stand one below the other; 384 experts take 2,000."""


class RecipeTable:
    """Collects recipes. Equal recipes get one place, and inputs stand before what reads them."""

    def __init__(self) -> None:
        self.nodes: list[Json] = []
        self._kept: list[Recipe] = []  # keeps the identities below from being used again
        self._by_identity: dict[int, int] = {}
        self._by_text: dict[str, int] = {}

    def add(self, recipe: Recipe) -> int:
        """The place of a recipe, added where it is new."""
        known = self._by_identity.get(id(recipe))
        if known is None:
            template = _template(recipe.parts) if isinstance(recipe, Concat) else None
            known = self._concat(template) if template else self._node(recipe)
            self._by_identity[id(recipe)] = known
            self._kept.append(recipe)
        return known

    def _node(self, recipe: Recipe) -> int:
        below = {
            name: self.add(found) if isinstance(found, Recipe) else [self.add(part) for part in found]
            for name, found in recipe.named_inputs().items()
        }
        return self._place({"op": recipe.op} | recipe.attributes(), below)

    def _concat(self, template: _Template) -> int:
        each = self._pattern(template.first, template.at)
        return self._place({"op": Concat.op}, {"parts": {"each": each, "from": template.start, "to": template.stop}})

    def _pattern(self, recipe: Recipe, at: int) -> int:
        """The place of a recipe that stands for many: names of its tensors are in two pieces, around a number."""
        node = {"op": recipe.op} | recipe.attributes()
        if isinstance(recipe, Read):
            node["tensor"] = list(_pieces(recipe.tensor, at))
        below = {name: self._pattern(each, at) for name, each in recipe.named_inputs().items() if _is_one(each)}
        return self._place(node, below)

    def _place(self, node: Json, inputs: Json) -> int:
        if inputs:
            node["inputs"] = inputs
        known = self._by_text.setdefault(json.dumps(node, sort_keys=True), len(self.nodes))
        if known == len(self.nodes):
            self.nodes.append(node)
        return known


@dataclass(frozen=True)
class _Template:
    """Parts that differ only in part ``at`` of their tensors' names, which counts from ``start`` up to ``stop``."""

    first: Recipe
    at: int
    start: int
    stop: int


def _template(parts: Sequence[Recipe]) -> _Template | None:
    """What the parts have in common, or None where they are few or differ in more than one number.

    Every field of every part is compared, at the speed of ``attrgetter``, since there may be 100,000 parts in a model.
    """
    if len(parts) < FEWEST:
        return None
    at = _differing([next((read.tensor for read in part.reads()), "") for part in parts[:2]])
    leaves = dict(_leaves(parts[0]))
    if at is None or any(is_input(value) for value in leaves.values()):
        return None
    tensors = {path: _pieces(value, at) for path, value in leaves.items() if path.rpartition(".")[2] == "tensor"}
    numbered, others = attrgetter("op", *tensors), attrgetter("op", *(leaves.keys() - tensors.keys()))
    start, wanted = int(next(parts[0].reads()).tensor.split(".")[at]), others(parts[0])
    for number, part in enumerate(parts, start):
        names = (part.op, *(f"{before}{number}{after}" for before, after in tensors.values()))
        try:
            if numbered(part) != names or others(part) != wanted:
                return None
        except AttributeError:  # it lacks an input that the first has
            return None
    return _Template(parts[0], at, start, start + len(parts))


def _differing(names: Sequence[str]) -> int | None:
    """The part of two names, between dots, that is a number and the only one in which they differ."""
    one, other = (name.split(".") for name in names)
    found = [at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    return found[0] if len(found) == 1 and one[found[0]].isdecimal() else None


def _pieces(tensor: str, at: int) -> tuple[str, str]:
    """What stands before and behind part ``at`` of a name."""
    parts = tensor.split(".")
    return ".".join([*parts[:at], ""]), ".".join(["", *parts[at + 1 :]])


def _leaves(recipe: Recipe, path: str = "") -> Iterator[tuple[str, Any]]:
    """The op and the fields of a recipe and of the inputs below it, by their path from it."""
    yield f"{path}op", recipe.op
    for name, value in recipe.by_field().items():
        if isinstance(value, Recipe):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield path + name, value


def _is_one(found: Recipe | tuple[Recipe, ...]) -> TypeGuard[Recipe]:
    return isinstance(found, Recipe)


class Numbered(list[Json]):
    """Nested recipes of one template: they differ in the number alone that stands in the names of their tensors."""


class NestedRecipes:
    """Recipes of a plan as nested JSON, by their place in its table; what they share is shared here."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.nodes: Any = plan.get("recipes")
        self._made: dict[int, Json] = {}
        if not is_list(self.nodes):
            raise self._damaged("is no list")
        self._check_sizes()

    def of(self, weight: Mapping[str, Any]) -> list[Json]:
        """The recipe of a weight on every rank. Raises TapeoutError where the table does not hold them."""
        ranks: Any = weight.get("ranks")
        if not is_list(ranks) or not ranks:
            raise self._damaged(f"has no places for the ranks of {weight.get('name')}")
        return [self.nested(place, len(self.nodes)) for place in ranks]

    def nested(self, place: Any, below: int, number: int | None = None) -> Json:
        """The recipe at a place below ``below``; of a template with a number."""
        if type(place) is not int or not 0 <= place < below:
            raise self._damaged(f"names {place!r:.20} where a place from 0 and below {below} is needed")
        if number is None and place in self._made:
            return self._made[place]
        node: Any = self.nodes[place]
        if not is_mapping(node) or not isinstance(node.get("op"), str):
            raise self._damaged(f"has {node!r:.60} at place {place}; each needs an op")
        made = {name: value for name, value in node.items() if name != "inputs"}
        inputs: Any = node.get("inputs", {})
        if not is_mapping(inputs) or inputs.keys() & made.keys():
            raise self._damaged(f"has the inputs {inputs!r:.60} at place {place}; they go by name")
        made |= {name: self._input(found, place, number) for name, found in inputs.items()}
        if is_list(made.get("tensor")):
            made["tensor"] = self._name(made["tensor"], place, number)
        if number is None:
            self._made[place] = made
        return made

    def _input(self, found: Any, below: int, number: int | None) -> Any:
        if is_list(found):
            return [self.nested(place, below, number) for place in found]
        if not is_mapping(found):
            return self.nested(found, below, number)
        start, stop = found.get("from"), found.get("to")
        if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= start + MOST:
            raise self._damaged(f"counts from {start!r:.20} to {stop!r:.20} at place {below}; at most {MOST} are read")
        return Numbered(self.nested(found.get("each"), below, each) for each in range(start, stop))

    def _name(self, pieces: Sequence[Any], place: int, number: int | None) -> str:
        if number is None or not all(isinstance(piece, str) for piece in pieces):
            raise self._damaged(f"has the tensor {pieces!r:.60} at place {place}, where no number stands for")
        return str(number).join(pieces)

    def _check_sizes(self) -> None:
        """A few steps that each read the one above twice would stand for more than fits in memory."""
        sizes: list[tuple[int, int]] = []
        for place, node in enumerate(self.nodes):
            below = [(sizes[at], times) for at, times in _places(node) if 0 <= at < place]
            size = 1 + sum(found[0] * times for found, times in below)
            depth = 1 + max((found[1] for found, _ in below), default=0)
            if size > LARGEST or depth > DEEPEST:
                raise self._damaged(f"stands for more than {LARGEST:,} steps, or {DEEPEST} in a row, at place {place}")
            sizes.append((size, depth))

    def _damaged(self, how: str) -> TapeoutError:
        return TapeoutError(f"the plan's table of recipes {how}; it is damaged: compile again")


def _places(node: Any) -> Iterator[tuple[int, int]]:
    """The places that a step reads, each with how many times; what is no place is left to who reads it."""
    inputs: Any = node.get("inputs") if is_mapping(node) else None
    for found in inputs.values() if is_mapping(inputs) else ():
        times, places = 1, found if is_list(found) else [found]
        if is_mapping(found):
            start, stop, places = found.get("from"), found.get("to"), [found.get("each")]
            times = stop - start if isinstance(start, int) and isinstance(stop, int) else 0
        yield from ((at, times) for at in places if type(at) is int and 0 < times <= MOST)
