"""The look that all views share: plain tables without lines, which also read well in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 140


def console() -> Console:
    """Standard output; a fixed width where it is not a terminal, so that redirected output is stable."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def heading(text: str) -> Text:
    """A title above a table."""
    return Text(text, style="bold")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> Table:
    """Rows under ``columns`` (empty names for none); ``right`` lists the columns aligned to the right."""
    to_right = set(right)
    grid = Table(box=None, show_header=any(columns), header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        grid.add_column(name, justify="right" if index in to_right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid
