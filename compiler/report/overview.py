"""The figures at the top of the page, and the table of what is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapeout.compiler.report.communication import exchanges
from tapeout.compiler.report.launches import bytes_of_list, reader_of
from tapeout.compiler.report.memory import ranks
from tapeout.compiler.views.inspect import format_totals, model_rows, sum_of_formats
from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.text import microseconds, size


@dataclass(frozen=True)
class Figure:
    """One number with its label, a remark, and the exact value where the number is rounded."""

    label: str
    value: str
    remark: str = ""
    exact: str = ""


def figures(plan: Plan) -> list[Figure]:
    """What a reader asks first."""
    kv, everything = plan["memory"]["kv"], sum_of_formats(format_totals(plan))
    return [
        Figure("parameters", _short(plan["model"]["parameters"]), "", f"{plan['model']['parameters']:,}"),
        Figure("bits a weight", f"{everything.bits:.2f}" if everything.parameters else "-", "with scales"),
        _memory(plan),
        Figure("KV tokens", f"{kv['pages'] * kv['page_tokens']:,}", _kv_remark(kv)),
        *_of_a_token(plan),
    ]


def pairs(plans: Sequence[Plan]) -> list[tuple[str, list[Figure | None]]]:
    """Each label with the figure of every plan, or None where a plan has none of it."""
    columns = [{figure.label: figure for figure in figures(plan)} for plan in plans]
    labels = dict.fromkeys(label for column in columns for label in column)
    return [(label, [column.get(label) for column in columns]) for label in labels]


def _memory(plan: Plan) -> Figure:
    largest = max(ranks(plan), key=lambda rank: rank.total)
    several = "on each rank" if plan["spec"]["topology"]["count"] > 1 else ""
    share = f"{largest.total / largest.capacity:.1%} of {size(largest.capacity)}" if largest.capacity else ""
    return Figure("memory", size(largest.total), ", ".join(filter(None, (several, share))), _exact(largest.total))


def _of_a_token(plan: Plan) -> list[Figure]:
    """What one token of one sequence takes in decode."""
    step = decode_lists(plan)
    if not step:
        return []
    reader = reader_of(plan)
    read = sum(bytes_of_list(reader, graph) for graph in step)
    names = [graph["name"] for graph in step]
    whose = "in decode, at most" if plan["spec"]["topology"]["count"] == 1 else "by a rank in decode, at most"
    found = [
        Figure("weights read a token", size(read), whose, _exact(read)),
        Figure("launches a token", f"{sum(len(graph['launches']) for graph in step):,}", " and ".join(names)),
    ]
    times = [one.us for one in exchanges(plan).lists if one.name in names]
    spent = sum(time for time in times if time is not None)
    if times and None not in times:
        found.append(Figure("collectives a token", microseconds(spent), "predicted", f"{spent:,.1f} us"))
    return found


def _kv_remark(kv: Plan) -> str:
    fit = kv.get("tokens_that_fit", 0)
    return f"{kv['bytes_per_token']:,} bytes each" + (f"; {fit:,} would fit" if fit else "")


def decode_lists(plan: Plan) -> list[Plan]:
    """The lists that make one token of one sequence: a decode list holds its head and sampling on a GPU alone."""
    phases = ("decode",) if plan.get("target") == "cuda" else ("decode", "head")
    of_phase = ([graph for graph in plan["graphs"] if graph["phase"] == phase] for phase in phases)
    return [min(graphs, key=lambda graph: graph["rows"]) for graphs in of_phase if graphs]


@dataclass(frozen=True)
class Fact:
    """A line about what is served, a value for each plan."""

    label: str
    values: tuple[str, ...]


def facts(plans: Sequence[Plan]) -> list[Fact]:
    """What ``inspect`` says of the model, and with which versions the plan was made."""
    columns = [dict([*model_rows(plan), *_versions(plan)]) for plan in plans]
    labels = dict.fromkeys(label for column in columns for label in column)
    return [Fact(label, tuple(column.get(label, "-") for column in columns)) for label in labels]


def _versions(plan: Plan) -> list[tuple[str, str]]:
    kernels = plan["kernels"]
    rows = [("built for", ", ".join(kernels["targets"]))]
    if "compilers" in kernels:
        rows.append(("compilers", ", ".join(f"{name} {version}" for name, version in kernels["compilers"].items())))
    return [*rows, ("tapeout", f"{plan.get('tapeout_version', '-')}, plan format {plan['format_version']}")]


def _short(count: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:,}"


def _exact(count: int) -> str:
    return f"{count:,} bytes"
