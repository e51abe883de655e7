"""Time the linear kernels: the difference to float64 first, then microseconds, GB/s of weights and GOPS.

python tests/benchmarks/bench_linear.py [--formats q4_0,mxfp4] [--targets x86_64_v3] [--rows 1,512] [--threads 1,2]

Formats take turns, and the last column is the rate of bytes against that of the first format. Threads work on weights
of their own at the same time; times are processor time, and rates of threads are added.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import cpu_kernels as ck
import tile16_reference as tr

DRIVER = r"""
#include <time.h>
#include "tapeout_cpu.h"
/* Processor time in nanoseconds of running the launches one after the other, all tasks each. */
long bench(const tp_kernel *kernel, const tp_launch *launch, int launches, const tp_step *step, void *scratch) {
    struct timespec a, b;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    for (int i = 0; i < launches; i++)
        for (int t = 0, n = kernel->tasks(&launch[i], step); t < n; t++) kernel->run(&launch[i], step, t, scratch);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    return (b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec;
}
"""
# (columns, k, epilogue): q/k/v, gate/up, down, and a slice of the head of SmolLM2-135M and Gemma 3 270M
SHAPES = {
    "smollm2 qkv": (960, 576, 0),
    "smollm2 gate_up": (1536, 576, 2),
    "smollm2 down": (576, 1536, 1),
    "gemma gate_up": (2048, 640, 3),
    "gemma head": (16384, 640, 0),
    "square": (2048, 2048, 0),
}
COLD_BYTES = 96 << 20  # weights read in turn by the single-row case of a thread, so that they come from memory


def build_driver(folder: Path) -> ctypes.CDLL:
    source = folder / "driver.c"
    source.write_text(DRIVER)
    library = folder / "driver.so"
    zig = [sys.executable, "-m", "ziglang", "cc", "-O2", "-shared", "-fPIC", f"-I{ck.SOURCES}"]
    subprocess.run([*zig, str(source), "-o", str(library)], check=True)
    driver = ctypes.CDLL(str(library))
    driver.bench.restype = ctypes.c_long
    return driver


class Case:
    """One kernel with operands for some threads, checked against float64."""

    def __init__(self, kernel: ck.Kernel, name: str, shape: tuple[int, int, int], rows: int, threads: int, warm: bool):
        n, k, epilogue = shape
        rng = np.random.default_rng(1)
        raw = tr.random_rows(name, n << (epilogue > 1), k, rng)
        x = rng.standard_normal((rows, k)).astype(np.float32)
        buffer, exact = tr.quantize_x8(x, rows) if name in tr.QUANTIZED else (x, x.astype(np.float64))
        self.kernel, self.step, self.x = kernel, ck.Step(rows=rows), ck.aligned(buffer)
        packed = tr.pack(name, raw)
        self.nbytes, self.operations = packed.nbytes, 2 * rows * len(raw) * k
        self.copies = 1 if rows > 1 or warm else max(1, COLD_BYTES // packed.nbytes)
        # one array a thread: how pages fall would otherwise differ from case to case by a third
        repeated = np.tile(np.pad(packed, (0, -packed.nbytes % 4096)), (self.copies, 1))
        self.arenas = [ck.aligned(repeated).reshape(repeated.shape) for _ in range(threads)]
        self.y = [np.full((rows, n), np.nan, np.float32) for _ in range(threads)]
        self.scratch = [ck.aligned(np.zeros(ck.SCRATCH, np.uint8)) for _ in range(threads)]
        ck.run(kernel, ck.launch(self.x, self.arenas[0][0], self.y[0], n, k, rows, n, 0, None), self.step)
        w = tr.dequantize(name, raw)[:n].astype(np.float64)
        self.error = float(np.max(np.abs(self.y[0] - exact @ w.T) / (np.abs(exact) @ np.abs(w.T))))
        self.launches = [
            (ck.Launch * self.copies)(*[ck.launch(self.x, w, y, n, k, rows, n, epilogue, None) for w in arena])
            for arena, y in zip(self.arenas, self.y, strict=True)
        ]
        self.inner = 1 if self.copies > 1 else max(1, int(3e7 // (rows * len(raw) * k)))
        self.times: list[list[float]] = []

    def run(self, driver: ctypes.CDLL, pool: ThreadPoolExecutor) -> None:
        """Add the nanoseconds a launch takes each thread."""

        def one(thread: int) -> float:
            scratch = ctypes.c_void_p(self.scratch[thread].ctypes.data)
            arguments = (
                ctypes.byref(self.kernel),
                self.launches[thread],
                self.copies,
                ctypes.byref(self.step),
                scratch,
            )
            return sum(driver.bench(*arguments) for _ in range(self.inner)) / self.copies / self.inner

        self.times.append(list(pool.map(one, range(len(self.arenas)))))

    def rate(self, work: int) -> float:
        """Work a nanosecond of all threads together, the median of the runs."""
        return float(np.median([sum(work / time for time in times) for times in self.times]))

    def line(self, first: Case) -> str:
        """What was measured, in one line."""
        times = [np.mean(times) / 1e3 for times in self.times]
        return (
            f"error {self.error:.1e}  best {min(times):9.1f} us  median {np.median(times):9.1f} us"
            f" {self.rate(self.nbytes):6.1f} GB/s {self.rate(self.operations):6.1f} GOPS"
            f"  {self.rate(self.nbytes) / first.rate(first.nbytes):5.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="q4_1,q8_0,q5_0,f32")
    parser.add_argument("--targets", default=",".join(ck.TARGETS))
    parser.add_argument("--rows", default="1,512")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--shapes", default="smollm2 qkv,smollm2 gate_up,smollm2 down,gemma head")
    parser.add_argument("--warm", action="store_true", help="single-row case from the cache")
    parser.add_argument("--reps", type=int, default=7)
    options = parser.parse_args()
    formats, rows, threads = options.formats.split(","), options.rows.split(","), options.threads.split(",")
    targets = [t for t in options.targets.split(",") if ck.supported(t)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        driver = build_driver(Path(folder))
        libraries = {t: ck.build([("linear", name) for name in formats], t, Path(folder)) for t in targets}
        for shape, count, used, target in itertools.product(options.shapes.split(","), rows, threads, targets):
            cases = {
                name: Case(
                    ck.load(libraries[target], f"linear_{name}"),
                    name,
                    SHAPES[shape],
                    int(count),
                    int(used),
                    options.warm,
                )
                for name in formats
                if SHAPES[shape][1] % tr.block_size(name)[0] == 0
            }
            for _, case in itertools.product(range(options.reps), cases.values()):
                case.run(driver, pool)
            for name, case in cases.items():
                print(
                    f"{name:16s} {shape:16s} rows {count:>4s} threads {used} {target}: "
                    f"{case.line(next(iter(cases.values())))}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
