"""Plans of a tiny model, kept in artifacts/golden to be reviewed as diffs; `pytest --update-goldens` rewrites them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import checkpoint, compile_tiny

from tapeout.compiler.devices import load_device
from tapeout.compiler.diff import compare, render
from tapeout.compiler.plan import build_plan
from tapeout.compiler.spec import Model, Quantization, Rule, Serving, Spec

GOLDEN = Path(__file__).parents[2] / "artifacts" / "golden"
CASES = {
    "tiny-llama-bf16": Quantization(),
    "tiny-llama-q8_0": Quantization(default="q8_0", rules=(Rule(match="*.down_proj", format="q4_0"),)),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_are_as_reviewed(name: str, update_goldens: bool) -> None:
    serving = Serving(max_context=64, max_sequences=2, prefill_chunk=32)
    spec = Spec(model=Model(source="tiny"), quantization=CASES[name], serving=serving)
    results = compile_tiny(checkpoint(), spec.quantization, serving)
    generation = {"bos_token_id": None, "eos_token_ids": [2]}
    plan = json.loads(json.dumps(build_plan(spec, load_device("cpu"), results, generation, [])))
    path = GOLDEN / f"{name}.json"
    if update_goldens:
        path.write_text(json.dumps(plan, indent=1, sort_keys=True) + "\n")
    changes = compare(json.loads(path.read_text()), plan)
    assert not changes, f"{render(changes)}\n(pytest --update-goldens accepts this)"
