"""When the blocks of a decode step's kernels do what: says why a kernel is slow that gpu_profile.py found to be.

    python gpu_stamps.py --build OUT CASE ...                 compile cases of gpu_shapes.py that stamp; needs no GPU
    python gpu_stamps.py OUT CASE ... [--contexts 128 8000]   run them

Products and attention, compiled with TP_STAMPS, note when each of their blocks reaches a place (TP_STAMP in
tapeout.cuh), in steps of 32 ns on an H200. The table has the last layer's kernels and the head in a replayed step, with
one row decoded. Times are in us from the end of the kernel before, which is its last warp's; a kernel behind one without
stamps, or behind one that ran again since, is marked ~ and its times are from 0.45 us before its first `wait`.

    blocks    with work / of the grid, whose others only hold their place
    dup       blocks beyond the first on their multiprocessor
    start     first instruction; negative where the block came while the kernel before ran
    ready     the block's own preparation is done: constants read, its ring of weights or keys full or on its way
    wait      tp_wait has returned: what the kernel before wrote may be read
    x         it is read, normalised and in shared memory; products begin
    first     the first warp of a block ends
    end       the last warp of a block ends
    each      the least, the median, the 90th percentile and the most over the blocks with work

What to look for:

    dup above 0         kernels do not take half of a multiprocessor: some have two blocks of one kernel, others none
    start near 0        the blocks had no room beside the kernel before: registers, shared memory, threads, carve-out
    ready above wait    the preparation is too long to hide behind the kernel before
    wait                about 0.45 is the floor: what a dependent launch costs
    x                   about 1.0 is good; more is a slow way to shared memory, or reads behind the ring's own
    first to end        imbalance between the warps of a block
    end, least to most  imbalance between blocks: too few items, or multiprocessors that are slower

Stamps cost registers and stores: compare the step's time with an artifact without them before trusting the table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

Stamps = npt.NDArray[np.void]
SLOTS = np.dtype([(name, np.int64) for name in ("start", "sm", "ready", "wait", "x")] + [("ends", np.int64, 32)])
"""Of one block, as ``tp_slot`` in tapeout.cuh; zero where a block or a warp did not get there."""
STAMPING = ("gemv.cu", "attention.cu")
FLOOR = 450
HEAD = f"    {'kernel':32s} {'blocks':>9s} {'dup':>4s} | {'':5s} {'least':>8s} {'median':>8s} {'90 %':>8s} {'most':>8s}"


def build(out: Path, cases: Sequence[str]) -> None:
    """Skeletons whose products and attention stamp. The define is part of what kernels are cached by."""
    from gpu_shapes import CASES
    from gpu_skeleton import compile_skeleton

    from tapeout.compiler.kernels.cuda import toolchain
    from tapeout.compiler.kernels.cuda.base import GpuKernel

    compile_all = toolchain.build

    def stamping(kernels: Sequence[GpuKernel], *rest: Any) -> Any:
        return compile_all(
            [replace(k, defines=(*k.defines, ("TP_STAMPS", 1))) if k.source in STAMPING else k for k in kernels], *rest
        )

    with mock.patch.object(toolchain, "build", stamping):
        for name in cases:
            compile_skeleton(CASES[name], out, "h200")


def run(skeletons: Path, name: str, contexts: Sequence[int]) -> None:
    """Fill a skeleton, and print a table for each number of tokens before the step."""
    import gpu_engine
    import gpu_fill

    from tapeout.runtime.cuda.driver import Driver

    modules: dict[str, Any] = {}
    load_module = Driver.module

    def module(driver: Driver, image: bytes, kernel: str) -> Any:
        modules[kernel] = load_module(driver, image, kernel)
        return modules[kernel]

    roomy = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=roomy) as scratch, mock.patch.object(Driver, "module", module):
        gpu_fill.fill(skeletons, Path(scratch), name)
        with gpu_engine.open_model(Path(scratch) / name) as model:
            memory = Memory(modules)
            plan = gpu_engine.decode_list(model, 1).plan
            replays = gpu_engine.Replays(model)
            for context in contexts:
                with gpu_engine.sequences(model, 1, context) as (held, tokens):
                    replays.seconds(held, tokens, 64)
                    memory.clear()
                    step = replays.seconds(held, tokens, 64)
                    print(f"{name}, {context} tokens: {step * 1e6:.1f} us a step", flush=True)
                    report(plan, memory.read())


class Memory:
    """The stamps in device memory, by kernel."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        from cuda.bindings import driver

        self.cu, self.places = driver, dict[str, tuple[Any, int]]()
        for name, module in modules.items():
            status, *place = driver.cuModuleGetGlobal(module, b"tp_stamps")
            if status == driver.CUresult.CUDA_SUCCESS:
                assert place[1] % SLOTS.itemsize == 0, "SLOTS differs from tp_slot in tapeout.cuh"
                self.places[name] = place[0], place[1]
        if not self.places:
            sys.exit("the kernels have no stamps: compile the case with --build")

    def clear(self) -> None:
        """Forget what earlier steps left."""
        for place, size in self.places.values():
            assert int(self.cu.cuMemsetD8(place, 0, size)[0]) == 0
        assert int(self.cu.cuCtxSynchronize()[0]) == 0

    def read(self) -> dict[str, Stamps]:
        """The stamps of each kernel's latest launch, blocks without any at the end."""
        found = {name: np.zeros(size // SLOTS.itemsize, SLOTS) for name, (_, size) in self.places.items()}
        for name, stamps in found.items():
            assert int(self.cu.cuMemcpyDtoH(stamps.ctypes.data, *self.places[name])[0]) == 0
        return found


def report(plan: Sequence[Mapping[str, Any]], stamps: Mapping[str, Stamps]) -> None:
    """Print the table of the launches that left the stamps: of each kernel the last in the plan."""
    print(HEAD, flush=True)
    latest = {launch["kernel"]: index for index, launch in enumerate(plan)}
    for index, launch in enumerate(plan):
        if launch["kernel"] in stamps and latest[launch["kernel"]] == index:
            before = plan[index - 1]["kernel"] if index else ""
            known = before in stamps and latest[before] == index - 1
            rows(launch["op"], stamps[launch["kernel"]], int(stamps[before]["ends"].max()) if known else None)


def rows(op: str, stamps: Stamps, before: int | None) -> None:
    """Print one kernel's part of the table; ``before`` is when the kernel before ended, if that is known."""
    started = stamps[stamps["start"] > 0]
    used = started[started["ends"].max(axis=1) > 0]
    zero = used["wait"].min() - FLOOR if before is None else before
    first = np.where(used["ends"] > 0, used["ends"], np.iinfo(np.int64).max).min(axis=1)
    times = {name: used[name] for name in ("start", "ready", "wait", "x")}
    times |= {"first": first, "end": used["ends"].max(axis=1)}
    name = f"{'~' if before is None else ''}{'.'.join(op.split('.')[-2:])}"
    dup = len(started) - len(np.unique(started["sm"]))
    left = f"{name:32s} {f'{len(used)}/{len(started)}':>9s} {dup:4d}"
    for name, values in times.items():
        numbers = " ".join(f"{each:8.2f}" for each in np.percentile((values - zero) / 1e3, [0, 50, 90, 100]))
        print(f"    {left:47s} | {name:5s} {numbers}", flush=True)
        left = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128])
    arguments = parser.parse_args()
    if arguments.build:
        return build(arguments.out, arguments.cases)
    for name in arguments.cases:
        run(arguments.out, name, arguments.contexts)


if __name__ == "__main__":
    main()
