"""Latency of all_reduce between ranks of this machine, beside gloo of torch.distributed in the same processes.

python tests/benchmarks/bench_collectives.py [--ranks 2] [--kib 2,8,32,128,512,1024] [--repeats 9] [--calls 200]

The two take turns; a repeat is the mean of some calls on rank 0, and the table shows medians of the repeats with the
smallest and the largest. Before anything is timed the sum is compared with numpy's. Ours is one native call of a
launch list of so many all_reduces, which is how a step runs them; gloo's is one Python call each. "python" is ours
called one by one from Python.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import rank_programs as rp
from native_engine import rows_step
from peers import machine

from tapeout.runtime.ranks import join, read_place, start_ranks

BUFFER_BYTES = 4 << 20


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kib", default="2,8,32,128,512,1024", help="sizes of an operand")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--calls", type=int, default=200, help="calls that a repeat averages")
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Sized:
    """One size of operand, and what is timed with it."""

    def __init__(self, rank: rp.Rank, nbytes: int, calls: int) -> None:
        self.k, self.rank, self.calls = nbytes // 4, rank, calls
        xs = np.random.default_rng(1).standard_normal((rank.count, 1, self.k), np.float32)
        self.want, self.x = functools.reduce(np.add, xs), xs[rank.rank]
        self.y = np.full_like(self.x, np.nan)
        self.step = rows_step(1)

    def native(self, two_shot: bool) -> None:
        shape = (self.x, self.k, self.y, self.k, self.k)
        launch = self.rank.native.launch("all_reduce", *shape, self.rank.comm.address, 0, int(two_shot))
        assert self.rank.native.run(self.step, [launch] * self.calls) == 0

    def python(self) -> None:
        for _ in range(self.calls):
            self.rank.comm.all_reduce(self.x.ctypes.data, self.y.ctypes.data, 1, self.k)

    def gloo(self) -> None:
        import torch
        import torch.distributed as dist

        y = torch.from_numpy(self.x.copy())
        dist.all_reduce(y)
        self.y[:] = y.numpy()
        for _ in range(self.calls - 1):
            dist.all_reduce(y)

    def check(self, name: str, once: Callable[[], None]) -> None:
        self.y[:] = np.nan
        once()
        exact = name != "gloo"
        assert np.array_equal(self.y, self.want) if exact else np.allclose(self.y, self.want, atol=1e-4), name


def work(arguments: argparse.Namespace) -> None:
    """What every rank does; rank 0 prints."""
    import torch.distributed as dist

    place = read_place()
    assert place
    with join(place, bytes(32), arguments.ranks, BUFFER_BYTES, patience_s=30) as member:
        dist.init_process_group(
            "gloo", init_method=f"file://{arguments.library.parent}/gloo", rank=place.rank, world_size=place.count
        )
        rank = rp.Rank(arguments.library, member)
        member.ready()
        for kib in map(int, arguments.kib.split(",")):
            row = measure(Sized(rank, kib << 10, arguments.calls), arguments.repeats)
            if rank.rank == 0:
                print(f"{kib:>6}  " + "  ".join(row), flush=True)
        dist.destroy_process_group()


def measure(sized: Sized, repeats: int) -> list[str]:
    ways: dict[str, Callable[[], None]] = {
        "one shot": lambda: sized.native(False),
        "two shots": lambda: sized.native(True),
        "python": sized.python,
        "gloo": sized.gloo,
    }
    for name, way in ways.items():
        sized.check(name, way)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append((time.perf_counter() - start) / sized.calls * 1e6)
    return [f"{statistics.median(t):>8.1f} ({min(t):.1f} to {max(t):.1f})".ljust(30) for t in times.values()]


def main() -> None:
    arguments = options()
    if arguments.library:
        work(arguments)
        return
    print(machine())
    print(f"all_reduce of float32 between {arguments.ranks} ranks, one thread each; microseconds a call")
    print(f"{'KiB':>6}  " + "  ".join(f"{name:<30}" for name in ("one shot", "two shots", "python", "gloo")))
    with tempfile.TemporaryDirectory() as folder:
        library = rp.build_library(Path(folder))
        words = ["--library", str(library), "--ranks", str(arguments.ranks), "--kib", arguments.kib]
        words += ["--repeats", str(arguments.repeats), "--calls", str(arguments.calls)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *words]
        with start_ranks(arguments.ranks, command, BUFFER_BYTES, patience_s=30, environ=environ) as ranks:
            sys.exit(ranks.wait())


if __name__ == "__main__":
    main()
