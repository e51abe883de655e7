"""Plans of a tiny model and of every example spec, kept in artifacts/golden to be reviewed as diffs.

`pytest --update-goldens` rewrites them. The tiny ones are whole; those of the examples are folded (``review_form``).
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plan_review import review_form
from tiny import checkpoint, compile_tiny

from tapeout.compiler.devices import load_device
from tapeout.compiler.diff import Change, compare, render
from tapeout.compiler.diff.values import compare_values
from tapeout.compiler.driver import compile_spec
from tapeout.compiler.plan import build_plan
from tapeout.compiler.spec import Model, Quantization, Rule, Serving, Spec, load_spec
from tapeout.runtime.errors import TapeoutError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "artifacts" / "golden"
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
CASES = {
    "tiny-llama-bf16": Quantization(),
    "tiny-llama-q8_0": Quantization(default="q8_0", rules=(Rule(match="*.down_proj", format="q4_0"),)),
}
MOST = 60  # changes that are printed


def expect(changes: list[Change]) -> None:
    """No change."""
    more = f"\nand {len(changes) - MOST} more" if len(changes) > MOST else ""
    assert not changes, f"{render(changes[:MOST])}{more}\n(pytest --update-goldens accepts this)"


def golden(name: str, found: Any, update: bool) -> Any:
    """What is kept under a name; with ``update``, first written."""
    path = GOLDEN / f"{name}.json"
    if update:
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", CASES)
def test_plans_are_as_reviewed(name: str, update_goldens: bool) -> None:
    serving = Serving(max_context=64, max_sequences=2, prefill_chunk=32)
    spec = Spec(model=Model(source="tiny"), quantization=CASES[name], serving=serving)
    results = compile_tiny(checkpoint(), spec.quantization, serving)
    generation = {"bos_token_id": None, "eos_token_ids": [2]}
    plan = json.loads(json.dumps(build_plan(spec, load_device("cpu"), results, generation, [])))
    expect(compare(golden(name, plan, update_goldens), plan))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_plans_of_the_examples_are_as_reviewed(path: Path, update_goldens: bool, tmp_path: Path) -> None:
    compile_spec(load_spec(path), tmp_path / "plan.json", base=path.parent, plan_only=True)
    found = review_form(json.loads((tmp_path / "plan.json").read_text()))
    expect(compare_values("plan", golden(path.stem, found, update_goldens), found))


def test_a_change_of_any_value_shows() -> None:
    plan, rng = json.loads((GOLDEN / "tiny-llama-q8_0.json").read_text()), random.Random(0)
    before = json.dumps(review_form(plan))
    for holder, key in rng.sample(list(holders(plan)), 300):
        value = holder[key]
        holder[key] = value + "x" if isinstance(value, str) else value + 1
        with contextlib.suppress(TapeoutError):  # a place in the table of recipes that there is not
            assert json.dumps(review_form(plan)) != before, (key, value)
        holder[key] = value


def test_a_tensor_of_another_layer_shows() -> None:
    plan = json.loads((GOLDEN / "tiny-llama-q8_0.json").read_text())
    before = review_form(plan)
    for node in plan["recipes"]:
        if node.get("tensor") == "model.layers.1.mlp.down_proj.weight":
            node["tensor"] = "model.layers.0.mlp.down_proj.weight"
    assert review_form(plan) != before


def holders(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every mapping or list of a document that holds a text or a number, with its key there."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(child, dict | list):
            yield from holders(child)
        elif isinstance(child, str | int | float) and not isinstance(child, bool):
            yield value, key


def test_every_golden_plan_is_compared() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == {*CASES, *(path.stem for path in SPECS)}
