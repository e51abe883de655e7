"""Time attention: the difference to float64 first, then microseconds, GFLOP/s and GB/s of cache, by threads.

python tests/benchmarks/bench_attention.py [--targets x86_64_v3] [--threads 1,2] [--reps 9]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import native_engine as ne

from tapeout.compiler.kernels import simple

PAGE = 32


@dataclass(frozen=True)
class Case:
    """Attention of one model in one kind of step: ``rows`` new positions on top of ``past``."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    d: int
    rows: int
    past: int
    window: int = 0


CASES = (
    Case("smollm2 prefill 512", 30, 9, 3, 64, 512, 0),
    Case("smollm2 decode at 512", 30, 9, 3, 64, 1, 511),
    Case("smollm2 decode at 8192", 30, 9, 3, 64, 1, 8191),
    Case("gemma3 prefill 512", 18, 4, 1, 256, 512, 0),
    Case("gemma3 decode at 512", 18, 4, 1, 256, 1, 511),
    Case("gemma3 decode at 8192, window 512", 18, 4, 1, 256, 1, 8191, 512),
)


class Problem:
    """The arrays of one case: one pool a layer, so that the cache comes from where it would."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(0)
        self.case, length = case, case.past + case.rows
        pages, width = -(-length // PAGE), case.heads * case.d
        self.pool = rng.standard_normal((case.layers, pages, 2, case.kv_heads * case.d * PAGE), np.float32)
        self.pool = self.pool.astype(np.float16)
        self.q = rng.standard_normal((case.rows, width), np.float32)
        self.out = ne.poison(case.rows, width)
        self.part = np.zeros(simple.attention_split_bytes(1, case.heads, case.d), np.uint8)
        self.step = ne.make_step([(case.past, case.rows, range(pages))])

    def launches(self, native: ne.Native) -> list[ne.Launch]:
        """All layers' launches, as in a step."""
        case, width = self.case, self.case.heads * self.case.d
        shape = (case.heads, case.kv_heads, case.d, PAGE, case.d**-0.5, case.window)
        calls = []
        for pool in self.pool:
            arguments = (self.q, width, self.out, pool, *shape, self.part, self.part.nbytes)
            calls += [native.launch(name, *arguments) for name in ("attention_f16", "attention_combine")]
        return calls

    def error(self) -> float:
        """Largest difference of the last row (of the last layer) from float64."""
        case, position = self.case, self.case.past + self.case.rows - 1
        first = max(0, position - case.window + 1) if case.window else 0
        pool = self.pool[-1].astype(np.float64)
        keys = pool[:, 0].reshape(-1, case.kv_heads, case.d, PAGE).transpose(1, 2, 0, 3)
        keys = keys.reshape(case.kv_heads, case.d, -1)[:, :, first : position + 1]
        values = pool[:, 1].reshape(-1, case.kv_heads, PAGE, case.d).transpose(1, 0, 2, 3)
        values = values.reshape(case.kv_heads, -1, case.d)[:, first : position + 1]
        q = self.q[-1].astype(np.float64).reshape(case.kv_heads, -1, case.d)
        score = np.exp(np.einsum("kgd,kdt->kgt", q, keys) * case.d**-0.5)
        expected = np.einsum("kgt,ktd->kgd", score / score.sum(axis=-1, keepdims=True), values)
        return float(np.abs(self.out[-1] - expected.reshape(-1)).max())

    def pairs(self) -> int:
        """(query, key) pairs of a layer and head."""
        case = self.case
        seen = range(case.past + 1, case.past + case.rows + 1)
        return sum(min(n, case.window) if case.window else n for n in seen)


def measure(native: ne.Native, problem: Problem, threads: int, reps: int) -> str:
    """One line: error, then the median time of all layers (processor time of one thread) and its rates."""
    case, launches = problem.case, problem.launches(native)
    times, clock = [], time.perf_counter if threads > 1 else time.process_time
    for _ in range(reps + 2):
        start = clock()
        native.run(problem.step, launches)
        times.append(clock() - start)
    seconds = statistics.median(times[2:])
    operations = 4 * problem.pairs() * case.heads * case.d * case.layers
    live = min(case.past + case.rows, case.window or 1 << 60)
    nbytes = 4 * live * case.kv_heads * case.d * case.layers
    return (
        f"max error {problem.error():.1e}  {seconds * 1e6:9.0f} us  {operations / seconds / 1e9:6.1f} GFLOP/s"
        f"  {nbytes / seconds / 1e9:5.1f} GB/s of cache"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default="x86_64_v3,x86_64_v4")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--reps", type=int, default=9)
    options = parser.parse_args()
    targets = [target for target in options.targets.split(",") if ne.supported(target)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ne.build(folder, targets)
        for case in CASES:
            problem = Problem(case)
            for target in targets:
                for threads in map(int, options.threads.split(",")):
                    native = ne.Native(folder / f"cpu-{target}.so", threads)
                    print(
                        f"{case.name:34} {target} {threads}t  {measure(native, problem, threads, options.reps)}",
                        flush=True,
                    )
                    native.close()


if __name__ == "__main__":
    main()
