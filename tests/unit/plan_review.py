"""A plan in the form that is kept for review: layers folded, recipes and addresses digested, everything under a name.

A plan of 61 layers has megabytes, nearly all of them repetitions. What is folded or digested still tells any change:
entries are folded only where they are the same but for their layer and place, and digests cover what is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tapeout.compiler.recipes_table import NestedRecipes
from tapeout.compiler.views.text import group_label, wildcard

Json = dict[str, Any]


def review_form(plan: Json) -> Json:
    """The plan, folded. Sections that are short stay as they are."""
    kept = ("format_version", "tapeout_version", "spec", "model", "checkpoint", "generation", "communication")
    graphs, memory = plan["graphs"], plan["memory"]
    buffers = {
        graph["name"]: [each for each in memory["buffers"] if each["graph"] == graph["name"]] for graph in graphs
    }
    caches = {each["name"]: each for each in memory["kv"]["caches"]}
    return {
        **{name: plan[name] for name in kept},
        "quantization": _folded({each["weight"]: each for each in plan["quantization"]}, ("weight",)),
        "weights": _weights(plan),
        "kernels": {**plan["kernels"], "table": {each["name"]: _kernel(each) for each in plan["kernels"]["table"]}},
        "memory": {**{name: value for name, value in memory.items() if name not in ("buffers", "kv")},
                   "kv": {**memory["kv"], "caches": _folded(caches, ("name", "offset"))}},
        "graphs": {graph["name"]: _graph(graph, buffers[graph["name"]]) for graph in graphs},
        "decisions": _decisions(plan["decisions"]),
    }  # fmt: skip


def digest(value: Any) -> str:
    """12 digits of the SHA-256 of canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _weights(plan: Json) -> Json:
    recipes = NestedRecipes(plan)
    shown: Json = {}
    for each in plan["weights"]:
        text = json.dumps(recipes.of(each), sort_keys=True)
        alike = digest(json.loads(text, object_hook=_named_alike))  # tensors of every layer have the same name
        shown[each["name"]] = {**each, "ranks": len(each["ranks"]), "recipes": alike, "tensors": digest(text)}
    return _folded(shown, ("name", "offset", "tensors"))


def _named_alike(node: Json) -> Json:
    return {name: wildcard(value) if name in ("tensor", "slot") else value for name, value in node.items()}


def _folded(entries: Mapping[str, Json], apart: Iterable[str]) -> Json:
    """One entry for those that say the same but for the keys ``apart``, whose digest it has."""
    members: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, entry in entries.items():
        said = {key: value for key, value in entry.items() if key not in apart}
        members[wildcard(name), digest(said)].append(name)
    folded: Json = {}
    for names in members.values():
        first = entries[names[0]]
        same = {key: value for key, value in first.items() if key not in apart}
        places = digest([[entries[name].get(key) for key in apart] for name in names])
        folded[group_label(names, entries)] = {**same, "places": places}
    return folded


def _graph(graph: Json, buffers: list[Json]) -> Json:
    """Launches by what they compute and with which kernel, and how many there are of each."""
    launches = Counter(f"{wildcard(each['op'])}: {each['kernel']}" for each in graph["launches"])
    return {
        "phase": graph["phase"],
        "rows": graph["rows"],
        "launches": dict(launches),
        "order and arguments": digest(graph["launches"]),
        "buffers": {"count": len(buffers), "places and lives": digest(buffers)},
    }


def _kernel(kernel: Json) -> Json:
    return {name: value for name, value in kernel.items() if name not in ("name", "params")} | {
        "params": digest(kernel["params"])
    }


def _decisions(decisions: list[Json]) -> Json:
    """By pass, subject and choice; each says why, and why not otherwise."""
    found: Json = {}
    for each in decisions:
        alternatives = {rival["choice"]: rival["why"] for rival in each["alternatives"]}
        why = {"reason": each["reason"], "evidence": each["evidence"], "alternatives": alternatives}
        subjects = found.setdefault(each["pass"], {})
        subjects.setdefault(each["subject"], {}).setdefault(each["choice"], []).append(why)
    return found
