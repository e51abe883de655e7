"""``explain``: decisions, what they rejected, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tapeout.compiler.views.plan_file import Plan
from tapeout.compiler.views.tables import console, heading
from tapeout.runtime.errors import TapeoutError

Decision = Mapping[str, Any]


def print_decisions(plan: Plan, subject: str | None = None, out: Console | None = None) -> None:
    """Decisions by pass, in the order they were made. Raises TapeoutError when none is about ``subject``."""
    out = out or console()
    chosen = [decision for decision in plan["decisions"] if subject is None or about(decision, subject)]
    if not chosen and subject is not None:
        known = list(dict.fromkeys(decision["subject"] for decision in plan["decisions"]))
        shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
        raise TapeoutError(f"no decision is about {subject}; subjects: {shown or 'none'}")
    current = ""
    for decision in chosen:
        if decision["pass"] != current:
            if current:
                out.print()
            current = decision["pass"]
            out.print(heading(current))
        _print(decision, out)


def about(decision: Decision, subject: str) -> bool:
    """Whether ``subject`` (a name, a glob, or a part of a name) meets what the decision is about."""
    own: str = decision["subject"]
    return fnmatchcase(own, subject) or fnmatchcase(subject, own) or subject in own or decision["pass"] == subject


def _print(decision: Decision, out: Console) -> None:
    title = Text.assemble(decision["subject"], " → ", (decision["choice"], "bold"))
    out.print(Padding(title, (0, 0, 0, 2), expand=False))
    lines = [f"because {decision['reason']}"]
    lines += [f"not {other['choice']}: {other['why']}" for other in decision.get("alternatives", [])]
    if decision.get("evidence"):
        facts = ", ".join(f"{name} {fact_text(value)}" for name, value in decision["evidence"].items())
        lines.append(f"evidence: {facts}")
    for line in lines:
        out.print(Padding(Text(line), (0, 0, 0, 6), expand=False))


def fact_text(value: Any) -> str:
    """A piece of evidence; whole numbers with separators."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
