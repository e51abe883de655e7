"""Plans that somebody damaged: inspect, explain, diff and report end in one sentence that names the place."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import compile_tiny

from tapeout.compiler.cli import main
from tapeout.compiler.devices import load_device
from tapeout.compiler.plan import build_plan
from tapeout.compiler.spec import Model, Spec, Topology

Plan = dict[str, Any]


@pytest.fixture(scope="module")
def whole() -> Plan:
    """A plan of two ranks, as a compile writes it."""
    spec = Spec(model=Model(source="tiny"), topology=Topology(count=2))
    results = compile_tiny(topology=spec.topology)
    return json.loads(json.dumps(build_plan(spec, load_device("cpu"), results, {}, [])))


@pytest.fixture
def plan(whole: Plan) -> Plan:
    return copy.deepcopy(whole)


def commands(folder: Path, plan: Plan, text: str | None = None) -> Iterator[list[str]]:
    """Every view of a plan, which is written into the folder."""
    file = folder / "plan.json"
    file.write_text(json.dumps(plan) if text is None else text)
    yield ["inspect", str(file)]
    yield ["inspect", str(file), "--weight", "*"]
    yield ["explain", str(file)]
    yield ["diff", str(file), str(folder / "whole.json")]
    yield ["diff", str(folder / "whole.json"), str(file)]
    yield ["report", str(file), "-o", str(folder / "plan.html")]
    yield ["report", str(file), str(folder / "whole.json"), "-o", str(folder / "plan.html")]


DAMAGES: dict[str, tuple[Callable[[Plan], object], str]] = {
    "communication is text": (
        lambda plan: plan.update(communication="none"),
        "communication is 'none', but must be a section with keys",
    ),
    "communication of other ranks": (
        lambda plan: plan["communication"].update(ranks=3),
        "communication.ranks is 3, but must be spec.topology.count, 2",
    ),
    "lists by name": (
        lambda plan: plan["communication"].update(lists={}),
        "communication.lists is {}, but must be a list",
    ),
    "a negative count": (
        lambda plan: plan["communication"]["lists"][0]["collectives"][0].update(count=-3),
        "communication.lists[0].collectives[0].count is -3, but must be a whole number from 1",
    ),
    "a time that is none": (
        lambda plan: plan["communication"]["lists"][0]["collectives"][0].update(us=float("nan")),
        "communication.lists[0].collectives[0].us is nan, but must be a number from 0",
    ),
    "a link of text": (
        lambda plan: plan["communication"].update(link={"gb_s": "fast", "latency_us": 2}),
        "communication.link.gb_s is 'fast', but must be a number from 0",
    ),
    "a link to a device of text": (
        lambda plan: plan["spec"]["topology"].update(links=[{"devices": ["a"], "gb_s": 1, "latency_us": 2}]),
        "spec.topology.links[0].devices[0] is 'a', but must be a whole number from 0",
    ),
    "no context": (
        lambda plan: plan["memory"].pop("context"),
        "memory.context is missing",
    ),
    "tokens that are true": (
        lambda plan: plan["memory"]["kv"].update(tokens_that_fit=True),
        "memory.kv.tokens_that_fit is True, but must be a whole number from 0",
    ),
    "a total below its parts": (
        lambda plan: plan["memory"].update(total=5, weights=10**6, kv_pool=10**6, arena=0, scratch=0),
        "memory.total is 5, but must be at least 2000000, what its parts take together",
    ),
    "a recipe too few": (
        lambda plan: plan["weights"][1]["ranks"].pop(),
        "weights[1].ranks is [0], but must be one recipe for each of 2 ranks",
    ),
    "a tensor without a shape": (
        lambda plan: plan["recipes"][0].pop("shape"),
        "recipes[0].shape is missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_plan_is_one_sentence(
    name: str, plan: Plan, whole: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    damage, sentence = DAMAGES[name]
    if name == "a recipe too few":
        plan["weights"][1]["ranks"] = [0, 0]
    damage(plan)
    for command in commands(tmp_path, plan):
        assert main(command) == 2
        expected = f"error: {tmp_path / 'plan.json'}: the plan is damaged: {sentence}; compile again\n"
        assert capsys.readouterr().err == expected


def test_a_plan_without_communication(
    plan: Plan, whole: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    del plan["communication"]
    for command in commands(tmp_path, plan):
        assert main(command) == 2
        expected = f"error: {tmp_path / 'plan.json'}: not a plan: sections are missing: communication\n"
        assert capsys.readouterr().err == expected


def test_recipes_that_stand_for_too_much(
    plan: Plan, whole: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step reads the one above twice, so that forty stand for a million million."""
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    first = len(plan["recipes"])
    plan["recipes"].append({"op": "read", "tensor": "w", "shape": [8, 4], "format": "f32"})
    plan["recipes"] += [{"op": "concat", "inputs": {"parts": [at, at]}} for at in range(first, first + 40)]
    plan["weights"][0]["ranks"] = [first + 40, first + 40]
    seen = 0
    for command in commands(tmp_path, plan):
        code, err = main(command), capsys.readouterr().err
        if code:
            seen += 1
            assert err == (
                "error: the plan's table of recipes stands for more than 1,048,576 steps, or 100 in a row, at place "
                f"{first + 20}; it is damaged: compile again\n"
            )
    assert seen == 5  # neither explain nor the tables of inspect read recipes


def test_half_a_surrogate_pair(plan: Plan, whole: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    text = json.dumps(plan | {"model": plan["model"] | {"name": "\ud800"}})
    for command in commands(tmp_path, plan, text):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {tmp_path / 'plan.json'}: not a plan: ")
        assert err.endswith("surrogates not allowed\n")
        assert err.count("\n") == 1


VALUES: tuple[Any, ...] = (None, -1, 0, 2**70, 1.5, "x", "", [], {}, [1], {"op": 3}, True)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a plan, sections included."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from places(child, (*path, key))


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_ends_in_a_sentence_or_a_page(
    seed: int, whole: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    rng = random.Random(seed)
    by_kind: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for path in places(whole):
        by_kind.setdefault(tuple("*" if isinstance(key, int) else key for key in path), []).append(path)
    for kind in rng.sample(sorted(by_kind, key=str), 24):
        path, value = rng.choice(by_kind[kind]), rng.choice(VALUES)
        plan = copy.deepcopy(whole)
        node: Any = plan
        for key in path[:-1]:
            node = node[key]
        if rng.random() < 0.25 and isinstance(node, dict):
            del node[path[-1]]
        else:
            node[path[-1]] = value
        command = rng.choice(list(commands(tmp_path, plan)))
        code, err = main(command), capsys.readouterr().err
        assert (code, err) == (0, "") or (code == 2 and err.startswith("error: ") and err.count("\n") == 1), (path, err)
