"""How long-running work reports progress, without knowing who watches."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self


class Task(Protocol):
    """One piece of work, used as a context manager; leaving it normally marks it finished."""

    def advance(self, amount: int) -> None:
        """``amount`` more of the total is done. May be called from any thread."""
        ...

    def note(self, text: str) -> None:
        """Say how it went, once, before it is finished."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Progress(Protocol):
    """Hands out tasks."""

    def task(self, label: str, total: int, unit: str = "") -> Task:
        """Start a task of ``total`` steps; ``unit`` is ``B`` when they are bytes."""
        ...


class SilentTask:
    """Says nothing."""

    def advance(self, amount: int) -> None:
        """Nothing to do."""

    def note(self, text: str) -> None:
        """Nothing to do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to do."""


class SilentProgress:
    """Progress for library use and tests."""

    def task(self, label: str, total: int, unit: str = "") -> SilentTask:
        """A task that says nothing."""
        return SilentTask()


def steps_of(task: Task) -> Callable[[int, int], None]:
    """Turns calls of (done, total), which may come from any thread, into advances of a task."""
    last = 0

    def report(done: int, total: int) -> None:
        nonlocal last
        del total
        task.advance(done - last)
        last = done

    return report
