"""``inspect``: a plan as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from rich.console import Console

from tapeout.compiler.views.kinds import bytes_by_kind
from tapeout.compiler.views.launches import graph_tables
from tapeout.compiler.views.plan_file import Plan, param_names
from tapeout.compiler.views.tables import console, heading, table
from tapeout.compiler.views.text import ranges, size

_BAR = 40
_SHOWN = 4
_TAKEN = ("registers", "shared", "blocks_per_sm")


def print_summary(plan: Plan, out: Console | None = None) -> None:
    """Model, memory and formats: what a compile prints."""
    out = out or console()
    out.print(table(("", ""), model_rows(plan)))
    ranks = plan["memory"].get("comm", {"ranks": 1})["ranks"]
    title = f"Memory of each of {ranks} ranks" if ranks > 1 else "Memory"
    _section(out, title, table(("", "", "", ""), _memory_rows(plan), right=(1, 2)))
    if len(kinds := bytes_by_kind(plan)) > 1:
        rows = [(kind, size(count), f"{count:,} B", _bar(count, sum(kinds.values()))) for kind, count in kinds.items()]
        _section(out, f"Weights{' of a rank' if ranks > 1 else ''}", table(("", "", "", ""), rows, right=(1, 2)))
    if plan["communication"]["lists"]:
        columns = ("list", "collective", "times", "bytes", "algorithm", "predicted")
        _section(out, "Collectives", table(columns, _collective_rows(plan), right=(2, 3, 5)))
    columns = ("format", "weights", "parameters", "bytes", "bits/weight", "share")
    _section(out, "Formats", table(columns, _format_rows(plan), right=range(1, 6)))


def print_plan(plan: Plan, out: Console | None = None) -> None:
    """The whole plan as tables."""
    out = out or console()
    print_summary(plan, out)
    _section(out, f"Kernels for {', '.join(plan['kernels']['targets'])}", _kernel_table(plan))
    for title, body in graph_tables(plan):
        _section(out, title, body)
    out.print()
    out.print(f"{len(plan['decisions'])} decisions; tapeout explain prints them.", style="dim")


def _section(out: Console, title: str, body: Any) -> None:
    out.print()
    out.print(heading(title))
    out.print(body)


def model_rows(plan: Plan) -> list[tuple[str, str]]:
    """What is served, from what and how much of it, each with its name."""
    model, spec = plan["model"], plan["spec"]
    serving, memory = spec["serving"], plan["memory"]
    kv = memory["kv"]
    context = serving.get("max_context") or kv["pages"] * kv["page_tokens"] // serving["max_sequences"]
    rows = [
        ("model", f"{model['name']} ({model['family']})"),
        ("parameters", f"{model['parameters']:,}, vocabulary of {model['vocab_size']:,}"),
        ("source", spec["model"]["source"] or "a config alone, in the spec"),
        *_hardware_rows(spec["topology"]),
        ("context", f"{context:,} tokens, {serving['max_sequences']} at a time"),
        ("KV pages", _kv_line(kv)),
    ]
    if plan.get("checkpoint", {}).get("tensors"):
        rows.insert(3, ("checkpoint", _checkpoint_line(plan["checkpoint"])))
    return [*rows, *_missing_rows(plan)]


def _missing_rows(plan: Plan) -> list[tuple[str, str]]:
    """That nothing can run the plan, where the device lacks a kernel; select_kernels says which."""
    if all(kernel["template"] != "none" for kernel in plan["kernels"]["table"]):
        return []
    made = [decision for decision in plan["decisions"] if decision["pass"] == "select_kernels"]
    return [("runs", "; ".join(["not yet", *(other["why"] for one in made for other in one.get("alternatives", ()))]))]


def _hardware_rows(topology: Plan) -> list[tuple[str, str]]:
    rows = [("device", f"{topology['count']} × {topology['device']}")]
    links = [f"devices {ranges(link['devices'])}: {link_text(link)}" for link in topology.get("links", ())]
    return [*rows, ("links", "; ".join(links))] if links else rows


def link_text(link: Plan) -> str:
    """``50 GB/s, 2 us a message``."""
    return f"{link['gb_s']:g} GB/s, {link['latency_us']:g} us a message"


def _checkpoint_line(checkpoint: Plan) -> str:
    line = f"{checkpoint['container']}, {checkpoint['consumed']} of {checkpoint['tensors']} tensors used"
    ignored = [entry["tensor"] for entry in checkpoint.get("ignored", [])]
    if not ignored:
        return line
    shown = ", ".join(ignored[:_SHOWN]) + (", ..." if len(ignored) > _SHOWN else "")
    return f"{line}, {len(ignored)} ignored: {shown}"


def _kv_line(kv: Plan) -> str:
    line = f"{kv['pages']} of {kv['page_tokens']} tokens in {kv['dtype']}, {kv['bytes_per_token']:,} bytes a token"
    fit = kv.get("tokens_that_fit", 0)
    return f"{line}; {fit:,} tokens would fit" if fit else line


def _collective_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Those of every list, with the predicted time of all of them together."""
    rows: list[tuple[str, ...]] = []
    for entry in plan["communication"]["lists"]:
        for made in entry["collectives"]:
            name = f"{entry['phase']}.{entry['rows']}"
            us = f"{made['count'] * made['us']:,.0f} us" if "us" in made else ""
            rows.append((name, made["kind"], f"{made['count']}", f"{made['bytes']:,}", made["algorithm"], us))
    return rows


def _memory_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    memory = plan["memory"]
    total, capacity = memory["total"], memory["capacity"]
    parts = [(name.replace("_", " "), memory[name]) for name in ("weights", "kv_pool", "arena", "scratch")]
    parts.append(("communication", total - sum(count for _, count in parts)))
    rows = [(name, size(count), f"{count:,} B", _bar(count, total)) for name, count in parts if count]
    percent = f"{total / capacity:.1%} of {size(capacity)}".replace("%", " %") if capacity else ""
    rows.append(("total", size(total), f"{total:,} B", percent))
    if capacity:
        rows.append(("free", size(capacity - total), f"{capacity - total:,} B", ""))
    if memory["context"]:
        rows.append(("driver", size(memory["context"]), f"{memory['context']:,} B", "its context, beside the total"))
    return rows


def _bar(part: int, whole: int) -> str:
    eighths = round(8 * _BAR * part / whole) if whole else 0
    if part and not eighths:
        eighths = 1
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")


@dataclass
class FormatTotals:
    """The weights of one number format; vectors apart from matrices."""

    name: str
    weights: int = 0
    parameters: int = 0
    bytes: int = 0

    @property
    def bits(self) -> float:
        """Bits of the file for each parameter."""
        return 8 * self.bytes / self.parameters


def format_totals(plan: Plan) -> list[FormatTotals]:
    """Every number format of the weights, the one that takes most bytes first."""
    totals: dict[str, FormatTotals] = {}
    for weight in plan["weights"]:
        name = weight["format"] if len(weight["shape"]) > 1 else f"{weight['format']} (vectors)"
        total = totals.setdefault(name, FormatTotals(name))
        total.weights += 1
        total.parameters += prod(weight["shape"])
        total.bytes += weight["bytes"]
    return sorted(totals.values(), key=lambda total: (-total.bytes, total.name))


def sum_of_formats(totals: Sequence[FormatTotals]) -> FormatTotals:
    """All formats together."""
    weights, parameters = sum(total.weights for total in totals), sum(total.parameters for total in totals)
    return FormatTotals("all", weights, parameters, sum(total.bytes for total in totals))


def _format_rows(plan: Plan) -> list[tuple[str, ...]]:
    totals = format_totals(plan)
    everything = sum_of_formats(totals)
    rows = [(*_format_row(total), f"{total.bytes / (everything.bytes or 1):.1%}") for total in totals]
    return [*rows, (*_format_row(everything), "")] if len(rows) > 1 else rows


def _format_row(total: FormatTotals) -> tuple[str, ...]:
    return total.name, str(total.weights), f"{total.parameters:,}", size(total.bytes), f"{total.bits:.2f}"


def _kernel_table(plan: Plan) -> Any:
    kernels = plan["kernels"]["table"]
    if any("resources" in kernel for kernel in kernels):
        return _cubin_table(plan)
    phases = list(dict.fromkeys(graph["phase"] for graph in plan["graphs"]))
    uses: dict[str, Counter[str]] = {}
    for phase in phases:
        graph = next(graph for graph in plan["graphs"] if graph["phase"] == phase)
        uses[phase] = Counter(launch["kernel"] for launch in graph["launches"])
    rows = [
        (kernel["name"], *(str(uses[phase][kernel["name"]] or "") for phase in phases), ", ".join(param_names(kernel)))
        for kernel in kernels
    ]
    return table(("kernel", *phases, "parameters"), rows, right=range(1, len(phases) + 1))


def _cubin_table(plan: Plan) -> Any:
    """GPU kernels: which lists launch each, and what it takes on each architecture."""
    lists: dict[str, list[str]] = {}
    for graph in plan["graphs"]:
        for name in dict.fromkeys(launch["kernel"] for launch in graph["launches"]):
            lists.setdefault(name, []).append(graph["name"])
    rows = [
        (kernel["name"], arch, *(f"{taken[key]:,}" for key in _TAKEN), ", ".join(lists.get(kernel["name"], [])))
        for kernel in plan["kernels"]["table"]
        for arch, taken in kernel.get("resources", {}).items()
    ]
    return table(("kernel", "for", "registers", "shared", "blocks/SM", "launched by"), rows, right=(2, 3, 4))
