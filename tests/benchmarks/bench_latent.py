"""Time latent attention by context, dense and over selected keys: difference to float64 first, then microseconds.

python tests/benchmarks/bench_latent.py [--targets x86_64_v3] [--threads 1,2] [--reps 5] [--contexts 1024,8192]

One layer in float16 pages of 32 tokens: decode of one row, and a prefill chunk; heads and widths of a model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import native_engine as ne

from tapeout.compiler.kernels import latent, simple

PAGE, LATENT, ROPE, TOP_K, INDEX_DIM = 32, 512, 64, 2048, 128
ENTRIES = (
    latent.latent_attention("f16"),
    latent.sparse_latent_attention("f16"),
    latent.index_select("f16"),
    latent.INDEX_MERGE,
    simple.ATTENTION_COMBINE,
)


@dataclass(frozen=True)
class Case:
    """Attention of one layer: ``rows`` new positions of a context; ``index_heads`` 0 is a model without an index."""

    name: str
    heads: int
    index_heads: int
    rows: int


CASES = (
    Case("deepseek-v2-lite decode", 16, 0, 1),
    Case("deepseek-v2-lite prefill of 64", 16, 0, 64),
    Case("glm-5 decode", 64, 32, 1),
    Case("glm-5 prefill of 16", 64, 32, 16),
)


class Problem:
    """The arrays of one case at one context."""

    def __init__(self, case: Case, context: int) -> None:
        rng = np.random.default_rng(0)
        self.case, self.first = case, context - case.rows
        pages, rows, heads = -(-context // PAGE), case.rows, case.heads
        self.pool = rng.standard_normal((pages, PAGE, LATENT + ROPE), np.float32).astype(np.float16)
        self.q = rng.standard_normal((rows, heads * LATENT), np.float32)
        self.q_rope = rng.standard_normal((rows, heads * ROPE), np.float32)
        self.out = ne.poison(rows, heads * LATENT)
        self.part = np.zeros(simple.attention_split_bytes(1, heads, LATENT), np.uint8)
        self.keys = rng.standard_normal((pages, INDEX_DIM, PAGE), np.float32).astype(np.float16)
        self.index_q = rng.standard_normal((rows, max(case.index_heads, 1) * INDEX_DIM), np.float32)
        self.weights = rng.standard_normal((rows, max(case.index_heads, 1)), np.float32)
        self.chosen = ne.poison(rows, TOP_K)
        self.parts = np.zeros(latent.index_parts_bytes(8, TOP_K), np.uint8)
        self.step = ne.make_step([(self.first, rows, range(pages))])

    def attend(self, native: ne.Native, sparse: bool) -> list[ne.Launch]:
        """Over all keys, or over what the index selected."""
        heads = self.case.heads
        shape = (heads, ROPE, LATENT, PAGE, self.scale, ROPE, self.part, self.part.nbytes, self.q_rope)
        combine = (heads, 1, LATENT, PAGE, self.scale, 0, self.part, self.part.nbytes)
        name, chosen = ("sparse_latent_attention_f16", (self.chosen, TOP_K)) if sparse else ("latent_attention_f16", ())
        return [
            native.launch(name, self.q, heads * ROPE, self.out, self.pool, *shape, *chosen),
            native.launch("attention_combine", self.q, heads * LATENT, self.out, self.pool, *combine),
        ]

    def select(self, native: ne.Native) -> list[ne.Launch]:
        """The index alone."""
        case = self.case
        shape = (case.index_heads, INDEX_DIM, self.weights, case.index_heads, PAGE, TOP_K, 1.0)
        arguments = (self.index_q, case.index_heads * INDEX_DIM, self.chosen, self.keys, *shape, self.parts)
        return [native.launch(name, *arguments, self.parts.nbytes) for name in ("index_select_f16", "index_merge")]

    @property
    def scale(self) -> float:
        """Of the softmax."""
        return 192**-0.5

    def error(self, positions: list[int]) -> float:
        """Largest difference of the last row from float64 over some positions."""
        keys = self.pool.reshape(-1, LATENT + ROPE)[positions].astype(np.float64)
        heads = self.case.heads
        q = np.concatenate([self.q[-1].reshape(heads, LATENT), self.q_rope[-1].reshape(heads, ROPE)], axis=1)
        score = q.astype(np.float64) @ keys.T * self.scale
        weight = np.exp(score - score.max(1, keepdims=True))
        expected = weight / weight.sum(1, keepdims=True) @ keys[:, :LATENT]
        return float(np.abs(self.out[-1].reshape(heads, LATENT) - expected).max())


def best(native: ne.Native, problem: Problem, launches: list[ne.Launch], repeats: int, threads: int) -> float:
    """Fewest seconds of a list of launches: of the processor with one thread, which other processes disturb least."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times: list[float] = []
    for _ in range(repeats):
        start = clock()
        assert native.run(problem.step, launches) == 0
        times.append(clock() - start)
    return min(times)


def measure(native: ne.Native, case: Case, context: int, repeats: int, threads: int) -> str:
    """One line of the table."""
    problem = Problem(case, context)
    dense = best(native, problem, problem.attend(native, sparse=False), repeats, threads)
    error = problem.error(list(range(context)))
    visible = sum(problem.first + row + 1 for row in range(case.rows))
    rate = 2 * case.heads * (2 * LATENT + ROPE) * visible / dense / 1e9
    text = f"dense {dense * 1e6:9.0f} us ({rate:5.0f} GFLOP/s, off by {error:.1e})"
    if case.index_heads and context > TOP_K:
        index = best(native, problem, problem.select(native), repeats, threads)
        sparse = best(native, problem, problem.attend(native, sparse=True), repeats, threads)
        error = problem.error(problem.chosen[-1].astype(int).tolist())
        text += f"   index {index * 1e6:9.0f} us, then sparse {sparse * 1e6:9.0f} us (off by {error:.1e})"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="x86_64_v3,x86_64_v4")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--contexts", default="1024,4096,16384")
    parser.add_argument("--cases", default="", help="only cases whose names hold this")
    parser.add_argument("--reps", type=int, default=5)
    arguments = parser.parse_args()
    targets = [target for target in arguments.targets.split(",") if ne.supported(target)]
    with tempfile.TemporaryDirectory() as folder:
        ne.build(Path(folder), targets, ENTRIES)
        for target in targets:
            for threads in map(int, arguments.threads.split(",")):
                native = ne.Native(Path(folder) / f"cpu-{target}.so", threads)
                for case in CASES:
                    for context in map(int, arguments.contexts.split(",") if arguments.cases in case.name else ()):
                        line = measure(native, case, context, arguments.reps, threads)
                        print(f"{target}, {threads} threads, {case.name} at {context}: {line}", flush=True)
                native.close()


if __name__ == "__main__":
    main()
