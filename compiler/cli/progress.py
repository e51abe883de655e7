"""Progress on standard error: bars on a terminal, one line a task elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tapeout.compiler.progress import Progress
from tapeout.compiler.views.text import size

if TYPE_CHECKING:
    import rich.progress


class _LineTask:
    """Prints a line when it is finished."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self._label, self._total, self._unit, self._note = label, total, unit, ""
        self._start = time.monotonic()

    def advance(self, amount: int) -> None:
        """Lines show no intermediate state."""

    def note(self, text: str) -> None:
        """Stands in the line."""
        self._note = f" ({text})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            done = f": {size(self._total)}" if self._unit == "B" else ""
            print(f"{self._label}{done}{self._note} in {time.monotonic() - self._start:.2f} s", file=sys.stderr)


class _LineProgress:
    def task(self, label: str, total: int, unit: str = "") -> _LineTask:
        return _LineTask(label, total, unit)


class _BarTask:
    def __init__(self, bars: rich.progress.Progress, label: str, total: int, unit: str) -> None:
        self._bars, self._label, self._total, self._unit = bars, label, total, unit
        self._done = 0
        self._task = bars.add_task(label, total=total, amount="")

    def advance(self, amount: int) -> None:
        """Move the bar; rich locks it itself."""
        self._done += amount
        done = (size(self._done), size(self._total)) if self._unit == "B" else (str(self._done), str(self._total))
        self._bars.update(self._task, advance=amount, amount=" / ".join(done))

    def note(self, text: str) -> None:
        """Stands beside the label."""
        self._bars.update(self._task, description=f"{self._label} ({text})")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._bars.update(self._task, completed=self._total)


class _BarProgress:
    def __init__(self, bars: rich.progress.Progress) -> None:
        self._bars = bars

    def task(self, label: str, total: int, unit: str = "") -> _BarTask:
        return _BarTask(self._bars, label, total, unit)


@contextmanager
def terminal_progress() -> Generator[Progress]:
    """Progress for the length of a command."""
    if not sys.stderr.isatty():
        yield _LineProgress()
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    columns = (
        TextColumn("{task.description:36}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        yield _BarProgress(bars)
