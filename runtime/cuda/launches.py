"""Launch lists bound to device addresses, and the graphs captured from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tapeout.runtime.cuda.driver import Bound, Driver, Where
from tapeout.runtime.errors import TapeoutError

Image = Callable[[str], bytes]


@dataclass(frozen=True)
class Region:
    """A piece of device memory that plan arguments count from."""

    address: int
    nbytes: int


class Addresses:
    """Turns plan arguments into device addresses. Raises TapeoutError for one that lies outside its region."""

    def __init__(self, regions: Mapping[str, Region], weights: Mapping[str, int], step: Callable[[str], int]) -> None:
        self._regions, self._weights, self._step = regions, weights, step

    def __call__(self, arg: Any) -> int:
        """The address of ``["arena" | "kv", offset]``, ``["weight", name]`` or ``["step", field]``."""
        base, where = cast(tuple[str, Any], arg)
        try:
            if base == "weight":
                return self._weights[where]
            if base == "step":
                return self._step(where)
            region = self._regions[base]
        except KeyError:
            raise TapeoutError(
                f"plan.json points at {base} {where}, but holds no such place; compile the artifact again"
            ) from None
        if not 0 <= where < region.nbytes:
            raise TapeoutError(f"plan.json places an argument at byte {where} of the {base}, which has {region.nbytes}")
        return region.address + where


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel and how it is launched. ``extra`` null pointers follow its own parameters."""

    name: str
    function: Any
    params: Sequence[tuple[str, str]]
    threads: int
    shared: int
    pdl: bool
    extra: int


def load_kernels(
    driver: Driver, table: Sequence[Mapping[str, Any]], architecture: str, image: Image
) -> dict[str, Kernel]:
    """Load the cubins of one architecture; ``image`` gives the verified bytes of ``kernels/<arch>/<name>.cubin``."""
    kernels: dict[str, Kernel] = {}
    for entry in table:
        name = entry["name"]
        resources = entry["resources"].get(architecture)
        if resources is None:
            raise TapeoutError(f"plan.json holds no kernel {name} for {architecture}; compile the artifact again")
        shared = resources["dynamic_shared"]
        module = driver.module(image(f"kernels/{architecture}/{name}.cubin"), name)
        kernels[name] = Kernel(
            name=name,
            function=driver.function(module, resources["symbol"], shared, name),
            params=[(param[0], param[1]) for param in entry["params"]],
            threads=entry["threads"],
            shared=shared,
            pdl=entry["pdl"] and driver.capability >= (9, 0),
            extra=resources.get("extra_ptrs", 0),
        )
    return kernels


class CudaList:
    """One launch list. It is bound, and captured, when it is first used; ``capture_s`` says how long that took."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.name: str = entry["name"]
        self.phase: str = entry["phase"]
        self.rows: int = entry["rows"]
        self.plan: Sequence[Mapping[str, Any]] = entry["launches"]
        self.bound: list[Bound] = []
        self.graph: Any = None
        self.capture_s = 0.0


class Launcher:
    """Runs launch lists on one stream, as graphs or launch by launch."""

    def __init__(
        self, driver: Driver, stream: Any, kernels: Mapping[str, Kernel], addresses: Addresses, *, graphs: bool
    ) -> None:
        self._driver, self._stream, self._graphs = driver, stream, graphs
        self._kernels, self._addresses = kernels, addresses

    def prepare(self, launches: CudaList) -> None:
        """Bind a list, and capture it where graphs are used."""
        if not launches.bound:
            started = time.perf_counter()
            launches.bound = [self._bind(launches, index) for index in range(len(launches.plan))]
            if self._graphs:
                launches.graph = self._driver.capture(launches.bound, self._stream, f"the graph {launches.name}")
            launches.capture_s = time.perf_counter() - started

    def run(self, launches: CudaList) -> None:
        """Put a list on the stream. Without graphs, wait for each launch, so that an error names it."""
        self.prepare(launches)
        if self._graphs:
            self._driver.replay(launches.graph, self._stream, f"the graph {launches.name}")
        else:
            for index in range(len(launches.bound)):
                self.run_one(launches, index)

    def run_one(self, launches: CudaList, index: int) -> None:
        """One launch; returns when it is done."""
        self.prepare(launches)
        bound = launches.bound[index]
        self._driver.launch(bound)
        self._driver.synchronize(self._stream, bound.where)

    def _bind(self, launches: CudaList, index: int) -> Bound:
        launch = launches.plan[index]
        where = Where(launches.name, index, launch["op"], launch["kernel"])
        kernel = self._kernels.get(launch["kernel"])
        if kernel is None:
            raise TapeoutError(f"plan.json holds no kernel {launch['kernel']}, which {launches.name} launches")
        args = launch["args"]
        missing = [name for name, _ in kernel.params if name not in args]
        if missing:
            raise TapeoutError(f"plan.json gives {where} no {', '.join(missing)}; compile the artifact again")
        values = [(kind, self._value(args[name])) for name, kind in kernel.params]
        values += [("ptr", 0)] * kernel.extra
        grid, shared = launch["grid"], kernel.shared
        return self._driver.bind(kernel.function, grid, kernel.threads, shared, kernel.pdl, values, self._stream, where)

    def _value(self, arg: Any) -> int | float:
        return self._addresses(arg) if isinstance(arg, list) else arg
