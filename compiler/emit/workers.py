"""Runs independent tasks on threads in order of their start, stopping at the first failure."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Task = TypeVar("Task")


def default_jobs() -> int:
    """One worker for each core this process may run on."""
    return len(os.sched_getaffinity(0))


def run_tasks(tasks: Iterable[Task], work: Callable[[Task], None], jobs: int) -> None:
    """Call ``work`` on every task from ``jobs`` threads. Raises what the earliest failing task raised.

    Tasks start in order, so whichever task fails first in the sequence always gets to run: the error that users see
    does not depend on ``jobs``. An interrupt stops the threads after their current task.
    """
    queue = iter(enumerate(tasks))
    lock = threading.Lock()
    failures: list[tuple[int, BaseException]] = []
    stop = threading.Event()

    def worker() -> None:
        while not stop.is_set():
            with lock:
                index, task = next(queue, (-1, None))
            if task is None:
                return
            try:
                work(task)
            except BaseException as error:
                failures.append((index, error))
                stop.set()

    threads = [threading.Thread(target=worker, name=f"emit-{index}") for index in range(jobs)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
