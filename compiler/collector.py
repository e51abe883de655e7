"""Python's cyclic collector, held back where hundreds of thousands of objects are made and all are kept."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def collector_paused() -> Generator[None]:
    """No cyclic collection inside; also a decorator. It would walk all that is there, time and again, and free nothing.

    What a reference count frees is freed as ever. A collector that was off already stays off.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
