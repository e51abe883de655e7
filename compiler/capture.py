"""Whether a GPU launch list can be captured once and replayed for every step: nothing in it may depend on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapeout.compiler.guards import is_list

BASES = ("arena", "weight", "kv", "step")
FIXED_ROWS = frozenset({"gemv"})
"""Templates that work on all rows of their bucket; all others read the live number of rows on the device."""


def check_capture(name: str, launches: Sequence[Mapping[str, Any]], templates: Mapping[str, str]) -> None:
    """Assert what replay needs of a list; ``templates`` names the template of each kernel.

    A launch has a fixed grid; its arguments are addresses of the plan, or null, so no size or pointer of one step is
    baked in; and where rows vary, the kernel reads how many there are from the step, in device memory. Kernels cannot
    allocate or synchronize: they have no way to call the driver.
    """
    for index, launch in enumerate(launches):
        where = f"{name}: launch {index}, {launch['kernel']} for {launch['op']}"
        grid = launch.get("grid")
        assert grid and len(grid) == 3 and min(grid) >= 1, f"{where}, has no fixed grid"
        for argument, value in launch["args"].items():
            is_address = is_list(value) and len(value) == 2 and value[0] in BASES
            assert is_address or value == 0, f"{where}, bakes {argument} = {value} into the graph"
        reads_rows = launch["args"].get("counts") == ["step", "counts"]
        assert reads_rows or templates[launch["kernel"]] in FIXED_ROWS, f"{where}, does not read the live rows"
