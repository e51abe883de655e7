"""Comparing launch lists: buckets, kernels an op runs on, arguments, and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tapeout.compiler.diff.changes import Change, Pairs, grouped
from tapeout.compiler.diff.values import leaves
from tapeout.compiler.guards import is_list
from tapeout.compiler.views.plan_file import Plan, param_names
from tapeout.compiler.views.recipes import short
from tapeout.compiler.views.text import wildcard

Key = tuple[str, str, int]
"""Op, kernel template, and how many launches of both came before."""
Launches = dict[Key, Plan]


@dataclass(frozen=True)
class Both:
    """A launch list that both plans have."""

    name: str
    head: bool
    old: Launches
    new: Launches

    def kept(self) -> Iterator[tuple[str, Plan, Plan]]:
        """Launches that both lists have, with their op."""
        return ((key[0], self.old[key], self.new[key]) for key in self.old if key in self.new)


def compare_kernels(before: Plan, after: Plan) -> list[Change]:
    """Kernels the artifact carries, the targets they are built for, and ops that run on another kernel."""
    old, new = before["kernels"], after["kernels"]
    changes: list[Change] = []
    if old["targets"] != new["targets"]:
        changes.append(Change("kernels", "targets", ", ".join(old["targets"]), ", ".join(new["targets"])))
    needed, needs = (str(kernels.get("multiprocessors", "none")) for kernels in (old, new))
    if needed != needs:
        changes.append(Change("kernels", "multiprocessors", needed, needs))
    changes += _tables(*({kernel["name"]: kernel for kernel in kernels["table"]} for kernels in (old, new)))
    return changes + _merged("kernels", _common(before, after), _kernel_pairs)


def _tables(old: Mapping[str, Plan], new: Mapping[str, Plan]) -> list[Change]:
    gone = ", ".join(name for name in old if name not in new)
    made = ", ".join(name for name in new if name not in old)
    changes = [Change("kernels", "in the artifact", gone, None)] if gone else []
    changes += [Change("kernels", "in the artifact", None, made)] if made else []
    changed = [name for name in old if name in new and old[name] != new[name]]
    return changes + [Change("kernels", name, _signature(old[name]), _signature(new[name])) for name in changed]


def _signature(kernel: Plan) -> str:
    extra = [f"{key} {value}" for key, value in kernel.items() if key not in ("name", "template", "params")]
    return ", ".join([f"{kernel['template']}({', '.join(param_names(kernel))})", *extra])


def compare_graphs(before: Plan, after: Plan) -> list[Change]:
    """Launch lists added and removed, and in those that stay: launches, arguments, order, addresses."""
    old = {graph["name"]: graph for graph in before["graphs"]}
    new = {graph["name"]: graph for graph in after["graphs"]}
    changes = [
        Change("graphs", name, _bucket(old.get(name)), _bucket(new.get(name)))
        for name in dict.fromkeys([*old, *new])
        if _bucket(old.get(name)) != _bucket(new.get(name))
    ]
    common = _common(before, after)
    for pairs in (_removed, _added, _argument_pairs):
        changes += _merged("graphs", common, pairs)
    return changes + _remark(common, _reordered, "launch order") + _remark(common, _readdressed, "addresses")


def _bucket(graph: Plan | None) -> str | None:
    if graph is None:
        return None
    return f"{graph['phase']} of up to {graph['rows']} rows, {len(graph['launches'])} launches"


def _common(before: Plan, after: Plan) -> list[Both]:
    templates = {kernel["name"]: kernel["template"] for plan in (before, after) for kernel in plan["kernels"]["table"]}
    new = {graph["name"]: graph for graph in after["graphs"]}
    pairs = ((graph, new[graph["name"]]) for graph in before["graphs"] if graph["name"] in new)
    return [Both(a["name"], a["phase"] == "head", _keyed(a, templates), _keyed(b, templates)) for a, b in pairs]


def _keyed(graph: Plan, templates: Mapping[str, str]) -> Launches:
    seen: Counter[tuple[str, str]] = Counter()
    keyed: Launches = {}
    for launch in graph["launches"]:
        kind = (launch["op"], templates.get(launch["kernel"], launch["kernel"]))
        keyed[*kind, seen[kind]] = launch
        seen[kind] += 1
    return keyed


def _kernel_pairs(both: Both) -> Pairs:
    return {op: (a["kernel"], b["kernel"]) for op, a, b in both.kept() if a["kernel"] != b["kernel"]}


def _removed(both: Both) -> Pairs:
    return {key[0]: (str(both.old[key]["kernel"]), None) for key in both.old if key not in both.new}


def _added(both: Both) -> Pairs:
    return {key[0]: (None, str(both.new[key]["kernel"])) for key in both.new if key not in both.old}


def _argument_pairs(both: Both) -> Pairs:
    """Numbers and weights that an op's launch is given; addresses in the arena and the pool are left to a remark.

    Where the kernel changed, only the parameters that both kernels have are compared; the rest follows from it.
    """
    found: dict[str, tuple[str | None, str | None]] = {}
    for op, old, new in both.kept():
        a, b = _fixed(old), _fixed(new)
        names = list(dict.fromkeys([*a, *b]))
        if old["kernel"] != new["kernel"]:
            names = [name for name in names if name in old["args"] and name in new["args"]]
        changed = [name for name in names if a.get(name) != b.get(name)]
        if changed:
            found[op] = (_named(a, changed), _named(b, changed))
    return found


def _fixed(launch: Plan) -> dict[str, Any]:
    """What does not depend on where buffers lie, layer numbers taken out."""
    fixed: dict[str, Any] = {}
    for name, value in launch["args"].items():
        if not _is_address(value):
            fixed[name] = _pointed_at(value) if is_list(value) else value
    rest = {key: value for key, value in launch.items() if key not in ("kernel", "op", "args")}
    found = leaves(rest) if rest else ()
    return fixed | {key: wildcard(value) if isinstance(value, str) else value for key, value in found}


def _pointed_at(value: list[Any]) -> str:
    """A weight by its name; what else there is (``comm 0``, ``rank [2, 8]``, ``step tokens``) with its kind."""
    kind, what = value
    return wildcard(str(what)) if kind == "weight" else f"{kind} {what}"


def _is_address(value: Any) -> bool:
    return is_list(value) and value[0] in ("arena", "kv")


def _named(args: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {short(args[name])}" for name in names if name in args) or "-"


def _reordered(both: Both) -> bool:
    return [key for key in both.old if key in both.new] != [key for key in both.new if key in both.old]


def _readdressed(both: Both) -> bool:
    return any(_addresses(a) != _addresses(b) for _, a, b in both.kept())


def _addresses(launch: Plan) -> dict[str, Any]:
    return {name: value for name, value in launch["args"].items() if _is_address(value)}


def _remark(common: list[Both], differs: Callable[[Both], bool], subject: str) -> list[Change]:
    names = [both.name for both in common if differs(both)]
    return [Change("graphs", subject, effect=f"differ in {', '.join(names)}")] if names else []


def _merged(section: str, common: list[Both], pairs: Callable[[Both], Pairs]) -> list[Change]:
    """Grouped over layers, then over launch lists; these are named unless it is every one of the body or the head."""
    ops = {key[0] for both in common for launches in (both.old, both.new) for key in launches}
    where: dict[Change, list[Both]] = {}
    for both in common:
        for change, _ in grouped(section, pairs(both), ops):
            where.setdefault(change, []).append(both)
    changes: list[Change] = []
    for change, changed in where.items():
        heads = {both.head for both in changed}
        all_of_them = len(changed) == sum(both.head in heads for both in common)
        names = ", ".join(both.name for both in changed)
        changes.append(replace(change, effect="" if all_of_them else f"in {names}"))
    return changes
