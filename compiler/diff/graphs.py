"""Comparing launch lists: buckets, kernels an op runs on, arguments, and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tapeout.compiler.diff.changes import Change, Pairs, grouped
from tapeout.compiler.guards import is_list
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.text import wildcard
from tapeout.compiler.views.weights import short

Key = tuple[str, int]
Launches = dict[Key, Plan]


def compare_kernels(before: Plan, after: Plan) -> list[Change]:
    """Kernels the artifact carries, the targets they are built for, and ops that run on another kernel."""
    old, new = before["kernels"], after["kernels"]
    changes: list[Change] = []
    if old["targets"] != new["targets"]:
        changes.append(Change("kernels", "targets", ", ".join(old["targets"]), ", ".join(new["targets"])))
    tables = [{kernel["name"]: kernel for kernel in kernels["table"]} for kernels in (old, new)]
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        a, b = (found.get(name) for found in tables)
        if a is None or b is None:
            changes.append(Change("kernels", name, a and "in the artifact", b and "in the artifact"))
        elif a != b:
            changes.append(Change("kernels", name, _signature(a), _signature(b)))
    per_graph = {name: _kernel_pairs(a, b) for name, a, b in _common(before, after)}
    return changes + _merged("kernels", per_graph, _ops(before, after))


def _signature(kernel: Mapping[str, Any]) -> str:
    extra = [f"{key} {value}" for key, value in kernel.items() if key not in ("name", "template", "params")]
    return ", ".join([f"{kernel['template']}({', '.join(kernel['params'])})", *extra])


def compare_graphs(before: Plan, after: Plan) -> list[Change]:
    """Launch lists added and removed, and in those that stay: ops, arguments, order, addresses."""
    old = {graph["name"]: graph for graph in before["graphs"]}
    new = {graph["name"]: graph for graph in after["graphs"]}
    changes = [
        Change("graphs", name, _bucket(old.get(name)), _bucket(new.get(name)))
        for name in dict.fromkeys([*old, *new])
        if _bucket(old.get(name)) != _bucket(new.get(name))
    ]
    common = _common(before, after)
    ops = _ops(before, after)
    changes += _merged("graphs", {name: _op_pairs(a, b) for name, a, b in common}, ops)
    changes += _merged("graphs", {name: _argument_pairs(a, b) for name, a, b in common}, ops)
    changes += _remark(common, _order, "launch order")
    return changes + _remark(common, _addresses, "addresses")


def _bucket(graph: Plan | None) -> str | None:
    if graph is None:
        return None
    return f"{graph['phase']} of up to {graph['rows']} rows, {len(graph['launches'])} launches"


def _keyed(graph: Plan) -> Launches:
    """Launches by op and how many launches of that op came before."""
    seen: Counter[str] = Counter()
    keyed: Launches = {}
    for launch in graph["launches"]:
        keyed[launch["op"], seen[launch["op"]]] = launch
        seen[launch["op"]] += 1
    return keyed


def _common(before: Plan, after: Plan) -> list[tuple[str, Launches, Launches]]:
    new = {graph["name"]: graph for graph in after["graphs"]}
    return [(g["name"], _keyed(g), _keyed(new[g["name"]])) for g in before["graphs"] if g["name"] in new]


def _ops(before: Plan, after: Plan) -> list[str]:
    return [launch["op"] for plan in (before, after) for graph in plan["graphs"] for launch in graph["launches"]]


def _kernel_pairs(old: Launches, new: Launches) -> Pairs:
    return {
        op: (old[op, turn]["kernel"], new[op, turn]["kernel"])
        for op, turn in old
        if (op, turn) in new and old[op, turn]["kernel"] != new[op, turn]["kernel"]
    }


def _op_pairs(old: Launches, new: Launches) -> Pairs:
    gone = {key[0]: (str(old[key]["kernel"]), None) for key in old if key not in new}
    made = {key[0]: (None, str(new[key]["kernel"])) for key in new if key not in old}
    return {**gone, **made}


def _argument_pairs(old: Launches, new: Launches) -> Pairs:
    """Numbers and weights that an op's launch is given; addresses in the arena and the pool are left to a remark."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for key in old:
        if key not in new:
            continue
        a, b = _fixed(old[key]), _fixed(new[key])
        names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
        if names:
            found[key[0]] = (_named(a, names), _named(b, names))
    return found


def _fixed(launch: Plan) -> dict[str, Any]:
    fixed: dict[str, Any] = {}
    for name, value in launch["args"].items():
        if not _is_address(value):
            fixed[name] = wildcard(value[1]) if is_list(value) else value
    return fixed | {key: value for key, value in launch.items() if key not in ("kernel", "op", "args")}


def _is_address(value: Any) -> bool:
    return is_list(value) and value[0] in ("arena", "kv")


def _named(args: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {short(args[name])}" for name in names if name in args) or "-"


def _order(old: Launches, new: Launches) -> bool:
    return [key for key in old if key in new] != [key for key in new if key in old]


def _addresses(old: Launches, new: Launches) -> bool:
    def addresses(launch: Plan) -> dict[str, Any]:
        return {name: value for name, value in launch["args"].items() if _is_address(value)}

    return any(addresses(old[key]) != addresses(new[key]) for key in old if key in new)


def _remark(common: list[tuple[str, Launches, Launches]], differs: Any, subject: str) -> list[Change]:
    names = [name for name, old, new in common if differs(old, new)]
    return [Change("graphs", subject, effect=f"differ in {', '.join(names)}")] if names else []


def _merged(section: str, per_graph: Mapping[str, Pairs], ops: Iterable[str]) -> list[Change]:
    """Grouped over layers, then over the launch lists in which the same holds."""
    everyone = set(ops)
    where: dict[Change, list[str]] = {}
    for name, pairs in per_graph.items():
        for change, _ in grouped(section, pairs, everyone, {}):
            where.setdefault(change, []).append(name)
    return [
        replace(change, effect="" if len(names) == len(per_graph) else f"in {', '.join(names)}")
        for change, names in where.items()
    ]
