"""Time the linear kernels on one thread: the difference to float64 first, then microseconds, GB/s of weights and GOPS.

python tests/benchmarks/bench_linear.py [--formats q4_1,q8_0] [--targets x86_64_v3] [--rows 1,512] [--reps 7]
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
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
    "k-quant": (2048, 2048, 0),
}
COLD_BYTES = 160 << 20  # weights read in turn by the single-row case, so that they come from memory


def build_driver(folder: Path) -> ctypes.CDLL:
    source = folder / "driver.c"
    source.write_text(DRIVER)
    library = folder / "driver.so"
    zig = [sys.executable, "-m", "ziglang", "cc", "-O2", "-shared", "-fPIC", f"-I{ck.SOURCES}"]
    subprocess.run([*zig, str(source), "-o", str(library)], check=True)
    driver = ctypes.CDLL(str(library))
    driver.bench.restype = ctypes.c_long
    return driver


def case(
    driver: ctypes.CDLL, kernel: ck.Kernel, name: str, shape: tuple[int, int, int], rows: int, reps: int, warm: bool
) -> str:
    """One line: error against float64, best and median time, and the rates of the median."""
    n, k, epilogue = shape
    rng = np.random.default_rng(1)
    raw = tr.random_rows(name, n << (epilogue > 1), k, rng)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    if name in tr.FLOATS:
        buffer, exact = ck.aligned(x), x.astype(np.float64)
    else:
        buffer, exact = tr.quantize_x8(x, rows)
        buffer = ck.aligned(buffer)
    packed = tr.pack(name, raw)
    copies = 1 if rows > 1 or warm else max(1, COLD_BYTES // packed.nbytes)
    weights = [ck.aligned(packed) for _ in range(copies)]
    y = np.full((rows, n), np.nan, np.float32)
    w = tr.dequantize(name, raw).astype(np.float64)
    plain = ck.launch(buffer, weights[0], y, n, k, rows, n, 0, None)
    step = ck.Step(rows=rows)
    ck.run(kernel, plain, step)
    error = np.max(np.abs(y - exact @ w[:n].T) / (np.abs(exact) @ np.abs(w[:n].T)))
    launches = (ck.Launch * copies)(*[ck.launch(buffer, i, y, n, k, rows, n, epilogue, None) for i in weights])
    scratch = ck.aligned(np.zeros(ck.SCRATCH, np.uint8))
    inner = 1 if copies > 1 else max(1, int(3e7 // (rows * len(raw) * k)))
    times = []
    for _ in range(reps):
        total = sum(
            driver.bench(
                ctypes.byref(kernel), launches, copies, ctypes.byref(step), ctypes.c_void_p(scratch.ctypes.data)
            )
            for _ in range(inner)
        )
        times.append(total / copies / inner)
    middle = float(np.median(times))
    operations = 2 * rows * len(raw) * k
    return (
        f"error {error:.1e}  best {min(times) / 1e3:9.1f} us {operations / min(times):6.1f} GOPS"
        f"  median {middle / 1e3:9.1f} us {packed.nbytes / middle:6.1f} GB/s {operations / middle:6.1f} GOPS"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="q4_1,q8_0,q5_0,q4_k,q6_k,f32")
    parser.add_argument("--targets", default=",".join(ck.TARGETS))
    parser.add_argument("--rows", default="1,512")
    parser.add_argument("--shapes", default="smollm2 qkv,smollm2 gate_up,smollm2 down,gemma head")
    parser.add_argument("--warm", action="store_true", help="single-row case from the cache")
    parser.add_argument("--reps", type=int, default=7)
    options = parser.parse_args()
    formats = options.formats.split(",")
    targets = [t for t in options.targets.split(",") if ck.supported(t)]
    with tempfile.TemporaryDirectory() as folder:
        driver = build_driver(Path(folder))
        libraries = {t: ck.build([("linear", name) for name in formats], t, Path(folder)) for t in targets}
        for name in formats:
            fits = [s for s in options.shapes.split(",") if SHAPES[s][1] % tr.block_size(name)[0] == 0]
            for shape in fits or ["k-quant"]:
                for rows in map(int, options.rows.split(",")):
                    for target in targets:
                        line = case(
                            driver,
                            ck.load(libraries[target], f"linear_{name}"),
                            name,
                            SHAPES[shape],
                            rows,
                            options.reps,
                            options.warm,
                        )
                        print(f"{name:5s} {shape:16s} rows {rows:4d} {target}: {line}", flush=True)


if __name__ == "__main__":
    main()
