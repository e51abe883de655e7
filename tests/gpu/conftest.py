"""Tests on a GPU; skipped where cuda.bindings finds none. See test_runtime_gpu.py for how to run them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]


def gpu_missing() -> str:
    """Why there is no GPU to test on; empty when there is."""
    try:
        from tapeout.runtime.cuda.driver import Driver

        Driver(0)
    except ValueError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and skip."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    missing = gpu_missing() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
