"""Assembles the page: sections from the plan's JSON, every value escaped, style and script from the package."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tapeout.compiler.diff import Change, compare
from tapeout.compiler.pipeline import PassInfo
from tapeout.compiler.report.communication import exchanges
from tapeout.compiler.report.html import html_environment, package_file
from tapeout.compiler.report.launches import collectives, launch_lists
from tapeout.compiler.report.memory import change, coloured, length, ranks, rows
from tapeout.compiler.report.overview import facts, pairs
from tapeout.compiler.report.passes import draw
from tapeout.compiler.report.weights import weight_groups
from tapeout.compiler.views.inspect import format_totals, sum_of_formats
from tapeout.compiler.views.plan_file import Plan, load_plan
from tapeout.runtime.errors import TapeoutError

_CHANGES = {
    "memory": ("memory",),
    "weights": ("weights", "recipes"),
    "launches": ("kernels", "graphs"),
    "collectives": ("communication",),
    "decisions": ("decisions",),
}
"""Which changes of ``diff`` stand in which section; those of all others stand in the first."""


@dataclass(frozen=True)
class Section:
    """A part of the page: its anchor, its title, and its HTML."""

    anchor: str
    title: str
    html: Markup


def write_report(paths: Sequence[Path], output: Path, passes: Sequence[PassInfo]) -> None:
    """Write the page of a plan, or of two, as ``output``. Raises TapeoutError where that is not called HTML."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise TapeoutError(f"-o {output}: a report is an HTML file, so its name ends in .html; -o plan.html would do")
    plans = [load_plan(path) for path in paths]
    output.write_text(render_report(plans, passes, [_short_name(path) for path in paths]), "utf-8")


def _short_name(path: Path) -> str:
    """What a plan of a comparison is called: its folder, or its file if that is not just plan.json."""
    whole = path.resolve()
    return whole.parent.name if whole.name == "plan.json" else whole.name


def render_report(plans: Sequence[Plan], passes: Sequence[PassInfo], names: Sequence[str] = ()) -> str:
    """The page of one plan, or the comparison of two, whose ``names`` tell them apart. Equal plans give equal pages."""
    assert len(plans) in (1, 2)
    environment = html_environment()
    changes = _changes(plans)
    shared: dict[str, Any] = {"plans": plans, "names": names, "tags": "AB", "changes": changes}
    sections = [
        Section(anchor, title, Markup(environment.get_template(f"{anchor}.html").render(shared | content)))
        for anchor, title, content in _contents(plans, passes)
    ]
    script = package_file("script.js")
    return environment.get_template("page.html").render(
        shared
        | {
            "title": " and ".join(dict.fromkeys(plan["model"]["name"] for plan in plans)),
            "sections": sections,
            "style": Markup(package_file("style.css")),
            "script": Markup(script),
            "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        }
    )


def _contents(plans: Sequence[Plan], passes: Sequence[PassInfo]) -> list[tuple[str, str, dict[str, Any]]]:
    """Anchor, title and values of every section, in the order of the page; anchors name their templates."""
    lists = [launch_lists(plan) for plan in plans]
    exchanged = [exchanges(plan) for plan in plans]
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("overview", "Overview", {"figures": pairs(plans), "facts": facts(plans)}),
        ("memory", "Memory", _memory(plans)),
        ("formats", "Number formats", _formats(plans)),
        ("weights", "Weights", {"groups": [weight_groups(plan) for plan in plans]}),
        ("launches", "Launches of a step", {"lists": lists}),
    ]
    if any(one.lists for one in exchanged):
        places = [collectives(plan, of_plan) for plan, of_plan in zip(plans, lists, strict=True)]
        found.append(("collectives", "Collectives", {"exchanged": exchanged, "places": places}))
    of_passes = [[decision["pass"] for decision in plan["decisions"]] for plan in plans]
    return [
        *found,
        ("passes", "Passes", {"drawing": draw(passes, of_passes[-1])}),
        ("decisions", "Decisions", {"decisions": [_by_pass(plan) for plan in plans]}),
    ]


def _memory(plans: Sequence[Plan]) -> dict[str, Any]:
    of_plans = coloured([ranks(plan) for plan in plans])
    columns = [rank for of_plan in of_plans for rank in of_plan]
    compared = len(plans) == 2 and len(columns) == 2
    totals = tuple(rank.total for rank in columns)
    return {
        "ranks": of_plans,
        "columns": columns,
        "rows": rows(columns, compare=compared),
        "length": length(columns),
        "tokens": [plan["memory"]["kv"].get("tokens_that_fit", 0) for plan in plans],
        "compared": compared,
        "change": change(totals) if compared else "",
    }


def _formats(plans: Sequence[Plan]) -> dict[str, Any]:
    totals = [format_totals(plan) for plan in plans]
    return {"formats": [(of_plan, sum_of_formats(of_plan)) for of_plan in totals]}


def _by_pass(plan: Plan) -> dict[str, list[tuple[Plan, list[str]]]]:
    """The decisions of each pass, with the subjects of those that are equal in all else."""
    passes: dict[str, dict[str, tuple[Plan, list[str]]]] = {}
    for decision in plan["decisions"]:
        rest = json.dumps({key: value for key, value in decision.items() if key != "subject"}, sort_keys=True)
        groups = passes.setdefault(decision["pass"], {})
        groups.setdefault(rest, (decision, []))[1].append(decision["subject"])
    return {name: list(groups.values()) for name, groups in passes.items()}


def _changes(plans: Sequence[Plan]) -> dict[str, list[Change]]:
    """What ``diff`` finds, by the section of the page in which it stands."""
    places = {name: section for section, names in _CHANGES.items() for name in names}
    found: dict[str, list[Change]] = {name: [] for name in ("overview", *_CHANGES)}
    if len(plans) == 2:
        for each in compare(plans[0], plans[1]):
            found[places.get(each.section, "overview")].append(each)
    return found
