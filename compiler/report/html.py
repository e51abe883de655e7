"""Templates, and how values are written in them; everything is escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tapeout.compiler.views.explain import fact_text
from tapeout.compiler.views.text import microseconds, size

_HERE = Path(__file__).parent


def html_environment() -> Environment:
    """The templates of this package, with the filters below."""
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "size": size,
        "count": _count,
        "fact": fact_text,
        "share": _share,
        "width": _width,
        "us": microseconds,
        "breakable": _breakable,
    }
    environment.filters.update(filters)
    return environment


def package_file(name: str) -> str:
    """A file that lies beside the templates' folder."""
    return (_HERE / name).read_text("utf-8")


def _count(number: int) -> str:
    return f"{number:,}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _width(part: float, whole: float) -> str:
    """A share as a length of CSS."""
    return f"{100 * part / whole:.3f}%" if whole else "0"


def _breakable(name: str) -> Markup:
    """A name that may be broken after its dots, slashes and underscores."""
    return Markup("<wbr>").join(re.split(r"(?<=[./_])", name))
