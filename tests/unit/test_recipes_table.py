"""The table of recipes in a plan: what stands in it, that it gives back what went in, and damaged ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tapeout.compiler.recipes import Concat, Constant, Convert, Interleave, Pack, Read, Recipe, Rows, Unpack
from tapeout.compiler.recipes_table import NestedRecipes, RecipeTable
from tapeout.runtime.errors import TapeoutError


def packed(name: str, zeros: bool = False, rows: int = 8) -> Unpack:
    """A matrix [rows, 64] as compressed-tensors keeps it."""
    codes, scales = Read(f"{name}.packed", (rows, 8), "i32"), Read(f"{name}.scale", (rows, 2), "bf16")
    return Unpack("pack-quantized", "int4_g32", codes, scales, Read(f"{name}.zero", (1, 2), "i32") if zeros else None)


def experts(*numbers: int, name: str = "l.7.experts.{}.up") -> Concat:
    return Concat(tuple(packed(name.format(number)) for number in numbers))


def written(*recipes: Recipe) -> tuple[list[dict[str, Any]], list[int]]:
    table = RecipeTable()
    places = [table.add(recipe) for recipe in recipes]
    return json.loads(json.dumps(table.nodes)), places


def read_back(nodes: list[dict[str, Any]], places: list[int]) -> list[dict[str, Any]]:
    return NestedRecipes({"recipes": nodes}).of({"name": "w", "ranks": places})


def plain(name: str, shape: list[int], kind: str) -> dict[str, Any]:
    return {"op": "read", "tensor": name, "shape": shape, "format": kind}


def test_each_step_stands_once_and_behind_its_inputs() -> None:
    """Equal steps of different objects have one place, those of all ranks and weights together."""
    halves = [Pack(Rows(Read("w", (8, 4), "f32"), at, at + 4), "raw") for at in (0, 4)]
    nodes, places = written(*halves, halves[0], Pack(Rows(Read("w", (8, 4), "f32"), 0, 4), "raw"))
    assert places == [2, 4, 2, 2]
    assert nodes == [
        {"op": "read", "tensor": "w", "shape": [8, 4], "format": "f32"},
        {"op": "rows", "inputs": {"source": 0}, "start": 0, "stop": 4},
        {"op": "pack", "inputs": {"source": 1}, "layout": "raw"},
        {"op": "rows", "inputs": {"source": 0}, "start": 4, "stop": 8},
        {"op": "pack", "inputs": {"source": 3}, "layout": "raw"},
    ]
    first, second, *others = read_back(nodes, places)
    whole = plain("w", [8, 4], "f32")
    assert first == {"op": "pack", "source": {"op": "rows", "source": whole, "start": 0, "stop": 4}, "layout": "raw"}
    assert second["source"]["start"] == 4 and others == [first, first]


def test_numbered_parts_are_one_template() -> None:
    nodes, places = written(experts(*range(2, 386)))
    assert places == [3] and nodes == [
        {"op": "read", "tensor": ["l.7.experts.", ".up.packed"], "shape": [8, 8], "format": "i32"},
        {"op": "read", "tensor": ["l.7.experts.", ".up.scale"], "shape": [8, 2], "format": "bf16"},
        {"op": "unpack", "packing": "pack-quantized", "to": "int4_g32", "zeros": None, "tensor_scale": None,
         "order": None, "inputs": {"codes": 0, "scales": 1}},
        {"op": "concat", "inputs": {"parts": {"each": 2, "from": 2, "to": 386}}},
    ]  # fmt: skip
    (recipe,) = read_back(nodes, places)
    assert recipe["op"] == "concat" and len(recipe["parts"]) == 384
    assert [part["codes"] for part in recipe["parts"]] == [
        plain(f"l.7.experts.{number}.up.packed", [8, 8], "i32") for number in range(2, 386)
    ]
    assert {part["to"] for part in recipe["parts"]} == {"int4_g32"}


ODD = {
    "too few": experts(0, 1, 2),
    "a gap": experts(0, 1, 3, 4),
    "descending": experts(4, 3, 2, 1),
    "leading zeros": Concat(tuple(packed(f"e.{number:02}.up") for number in range(5))),
    "two numbers": Concat(tuple(packed(f"l.{number}.e.{number}.up") for number in range(5))),
    "two layers": Concat((*experts(0, 1, 2).parts, packed("l.8.experts.3.up"))),
    "a shared tensor": Concat(
        tuple(Unpack("int-quantized", "int8_g32", Read(f"e.{number}.w", (8, 64), "i8"), Read("scale", (8, 2), "bf16"))
              for number in range(5))
    ),
    "other shapes": Concat((*experts(0, 1, 2, 3).parts, packed("l.7.experts.4.up", rows=16))),
    "one with zeros": Concat((*experts(0, 1, 2, 3).parts, packed("l.7.experts.4.up", zeros=True))),
    "zeros in all but one": Concat(
        (*(packed(f"l.7.experts.{number}.up", zeros=True) for number in range(4)), packed("l.7.experts.4.up"))
    ),
    "another step": Concat(
        (*(Read(f"e.{number}.w", (8, 64), "f32") for number in range(4)), Rows(Read("e.4.w", (9, 64), "f32"), 0, 8))
    ),
    "no number": Concat(tuple(Read(name, (8, 64), "f32") for name in ("a", "b", "c", "d"))),
    "no names": Concat(tuple(Constant((float(number),)) for number in range(5))),
    "nested": Concat(tuple(Concat((Read(f"e.{number}.a", (8,), "f32"),)) for number in range(5))),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_parts_that_are_no_series_stand_each(case: str) -> None:
    recipe = ODD[case]
    nodes, places = written(recipe)
    assert isinstance(nodes[-1]["inputs"]["parts"], list)
    assert read_back(nodes, places) == [recipe.to_json()]


@pytest.mark.parametrize("zeros", [False, True])
def test_what_goes_in_comes_out(zeros: bool) -> None:
    """Against the nested form that recipes have by themselves; templates of several widths and of plain tensors too."""
    gate, up = (Concat(tuple(packed(f"m.3.e.{n}.{part}", zeros) for n in range(8))) for part in ("gate", "up"))
    plain_parts = Concat(tuple(Convert(Read(f"{n}.w", (4, 32), "bf16"), "q8_0") for n in range(9, 13)))
    recipes = [
        Pack(Rows(Interleave((gate, up), 8), 16, 32), "tile16"),
        Pack(Rows(Interleave((gate, up), 8), 0, 16), "tile16"),
        Pack(plain_parts, "tile16"),
        Constant((1.0, 0.5)),
    ]
    nodes, places = written(*recipes)
    assert len(nodes) == (20 if zeros else 18)
    assert read_back(nodes, places) == [json.loads(json.dumps(recipe.to_json())) for recipe in recipes]
    assert written(*recipes) == (nodes, places)


DAMAGED = [
    (None, [0], "is no list"),
    ([], [], "has no places for the ranks of w"),
    ([], None, "has no places for the ranks of w"),
    ([{"op": "read"}], [1], "names 1 where a place from 0 and below 1 is needed"),
    ([{"op": "read"}], [-1], "names -1 where a place from 0 and below 1 is needed"),
    ([{"op": "read"}], [True], "names True where a place from 0 and below 1 is needed"),
    ([{"op": "rows", "inputs": {"source": 0}}], [0], "names 0 where a place from 0 and below 0 is needed"),
    ([{"op": "concat", "inputs": {"parts": ["x"]}}], [0], "names 'x' where a place from 0 and below 0 is needed"),
    ([{"inputs": {}}], [0], "has {'inputs': {}} at place 0; each needs an op"),
    (["read"], [0], "has 'read' at place 0; each needs an op"),
    ([{"op": "rows", "inputs": [0]}], [0], "has the inputs [0] at place 0; they go by name"),
    ([{"op": "read", "tensor": ["a", "b"]}], [0], "has the tensor ['a', 'b'] at place 0, where no number stands for"),
    ([{"op": "read", "tensor": [1]}, {"op": "concat", "inputs": {"parts": {"each": 0, "from": 0, "to": 2}}}], [1],
     "has the tensor [1] at place 0, where no number stands for"),
    ([{"op": "read"}, {"op": "concat", "inputs": {"parts": {"each": 0, "from": 0, "to": 10**12}}}], [1],
     "counts from 0 to 1000000000000 at place 1; at most 65536 are read"),
    ([{"op": "read"}, {"op": "concat", "inputs": {"parts": {"each": 0, "from": 2, "to": 2}}}], [1],
     "counts from 2 to 2 at place 1; at most 65536 are read"),
    ([{"op": "concat", "inputs": {"parts": {"each": 0, "from": 0, "to": 2}}}], [0],
     "names 0 where a place from 0 and below 0 is needed"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "places", "how"), DAMAGED)
def test_a_damaged_table_is_one_sentence(nodes: Any, places: Any, how: str) -> None:
    with pytest.raises(TapeoutError) as caught:
        NestedRecipes({"recipes": nodes}).of({"name": "w", "ranks": places})
    assert str(caught.value) == f"the plan's table of recipes {how}; it is damaged: compile again"
