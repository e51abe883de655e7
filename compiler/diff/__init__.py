"""What changed between two plans, and what it costs. Reads plan.json alone."""

from __future__ import annotations

from tapeout.compiler.diff.changes import Change, render
from tapeout.compiler.diff.communication import compare_communication
from tapeout.compiler.diff.decisions import compare_decisions
from tapeout.compiler.diff.graphs import compare_graphs, compare_kernels
from tapeout.compiler.diff.memory import compare_memory
from tapeout.compiler.diff.values import compare_values
from tapeout.compiler.diff.weights import compare_recipes, compare_weights, recipes_by_name
from tapeout.compiler.views.plan_file import Plan

__all__ = ["Change", "compare", "render"]

_SPECIAL = {"weights", "recipes", "kernels", "memory", "communication", "graphs", "decisions", "quantization",
            "format_version", "tapeout_version"}  # fmt: skip
_FIRST = ("spec", "model", "checkpoint")


def compare(before: Plan, after: Plan) -> list[Change]:
    """All changes, section by section; empty exactly when the plans say the same."""
    if before == after:
        return []
    sections = dict.fromkeys([*_FIRST, *before, *after])
    plain = [name for name in sections if name not in _SPECIAL]
    versions = ("format_version", "tapeout_version")
    changes = compare_values("version", *({name: plan.get(name) for name in versions} for plan in (before, after)))
    for name in (name for name in plain if name in _FIRST):
        changes += compare_values(name, before.get(name), after.get(name))
    changes += compare_weights(before, after)
    changes += compare_recipes(before, after)
    changes += compare_kernels(before, after)
    changes += compare_memory(before, after)
    changes += compare_graphs(before, after)
    changes += compare_communication(before, after)
    for name in (name for name in plain if name not in _FIRST):
        changes += compare_values(name, before.get(name), after.get(name))
    changes += compare_decisions(before, after)
    return changes or _unnamed(_without_places(before), _without_places(after))


def _without_places(plan: Plan) -> Plan:
    """The plan without its table of recipes, whose order means nothing: weights say theirs themselves."""
    recipes = recipes_by_name(plan)
    weights = [weight | {"ranks": recipes[weight["name"]]} for weight in plan["weights"]]
    return {name: section for name, section in plan.items() if name != "recipes"} | {"weights": weights}


def _unnamed(before: Plan, after: Plan) -> list[Change]:
    """The plans differ where no comparison looks; still never silent."""
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    effect = "differs in details that have no effect on what is run"
    return [Change("other", ", ".join(differing), effect=effect)] if differing else []
