"""What the CUDA runtime itself costs: start-up by parts, weights through pinned memory, the host's share of a step.

Runs the toy model of tests/unit/tiny_gpu.py with 4.2 GB of weights beside it, so it needs no artifact. No arguments.
"""

# ruff: noqa: E402 - the folders of the toy come first
from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("unit", "gpu")]

import numpy as np
import tiny_gpu
from gpu_toy import CONTEXT, toy_cubin

from tapeout.runtime import Model, load
from tapeout.runtime.cuda import upload
from tapeout.runtime.cuda.driver import Driver

BULK = 4_200_000_000 // 256 * 256
CHUNK = 8 << 20
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
FIRST_TOKEN = """
import sys, time
from tapeout.runtime import load
imported = time.time()
with load(sys.argv[1]) as model:
    loaded = time.time()
    next(model.generate({prompt}))
    print(time.time(), imported, loaded, flush=True)
"""


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long a block took."""
    started = time.perf_counter()
    yield
    print(f"{what:<44} {1e3 * (time.perf_counter() - started):9.1f} ms", flush=True)


def median_us(call: Callable[[], Any], count: int) -> float:
    """Median microseconds of a call."""
    times: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def start_up() -> str:
    """The parts of a start; returns the GPU's architecture."""
    with timed("import cuda.bindings.driver"):
        import cuda.bindings.driver  # noqa: F401
    with timed("cuInit and attributes"):
        driver = Driver(0)
    with timed("context"):
        driver.open()
    with timed("64 MiB of pinned memory"):
        driver.host_alloc(64 << 20)
    with timed("4.2 GB of device memory"):
        driver.alloc(BULK, "test")
    with timed("close"):
        driver.close()
    print(driver.name, driver.targets)
    return driver.targets[0]


def write(folder: Path, architecture: str) -> Path:
    """The toy with 4.2 GB beside it, its bytes in the page cache."""
    tiny_gpu.CHUNK = CHUNK
    piece = np.random.default_rng(0).bytes(64 << 20)
    bulk = (piece * (BULK // len(piece) + 1))[:BULK]
    cubin = toy_cubin(architecture)
    return tiny_gpu.write_artifact(folder, (architecture,), cubin=lambda *_: cubin, context=CONTEXT, bulk=bulk)


def loads(artifact: Path) -> None:
    """Load with several sizes of pieces and numbers of threads."""
    for threads, piece in ((16, 2 << 20), (16, 1 << 20), (16, 4 << 20), (8, 2 << 20), (12, 2 << 20)):
        upload.PIECE = piece
        times: list[tuple[float, float]] = []
        for _ in range(2):
            with load(artifact, threads=threads) as model:
                times.append((model.load_s, model.backend.upload_s))  # type: ignore[attr-defined]
                held = model.device_memory()
        best = min(times)
        print(f"load: {threads:2} threads, {piece >> 20} MiB: {best[0]:.3f} s, weights {best[1]:.3f} s, ", end="")
        print(f"{BULK / best[1] / 1e9:.1f} GB/s", flush=True)
    upload.PIECE = 2 << 20
    print(held)


def steps(model: Model) -> None:
    """Host time of a step's parts, and whole steps."""
    sequence = model.pool.open()
    token = model.prefill(sequence, PROMPT)
    submit: list[float] = []
    for _ in range(200):
        started = time.perf_counter()
        ticket = model.backend.decode([sequence], None if submit else [token])
        submit.append(time.perf_counter() - started)
        sequence.length += 1
        model.pool.grow(sequence, sequence.length + 1)
        model.backend.sampled(ticket)
    print(f"host time to submit a step: median {1e6 * statistics.median(submit):.1f} us")
    model.pool.close(sequence)
    for name, run in (("stream", stream), ("step by step", singles)):
        print(f"{name}: {median_us(lambda run=run: run(model), 9) / 20:.1f} us a step over positions 10 to 30")


def stream(model: Model) -> None:
    """Twenty steps, one in flight."""
    sequence = model.pool.open()
    token = model.prefill(sequence, PROMPT)
    for _ in model.stream([sequence], [token], 20):
        pass
    model.pool.close(sequence)


def singles(model: Model) -> None:
    """Twenty steps, each waited for."""
    sequence = model.pool.open()
    token = model.prefill(sequence, PROMPT)
    for _ in range(20):
        token = model.decode([sequence], [token])[0]
    model.pool.close(sequence)


def first_token(artifact: Path) -> None:
    """From the start of a process to its first token."""
    for _ in range(3):
        started = time.time()
        code = FIRST_TOKEN.format(prompt=PROMPT)
        done = subprocess.run([sys.executable, "-c", code, str(artifact)], check=True, capture_output=True, text=True)
        token, imported, loaded = map(float, done.stdout.split())
        parts = [imported - started, loaded - imported, token - loaded]
        print(
            f"process to first token {token - started:.3f} s: import, load, token", [round(part, 3) for part in parts]
        )


def main() -> None:
    """Everything, in about forty seconds."""
    architecture = start_up()
    with tempfile.TemporaryDirectory() as folder:
        with timed("writing the artifact"):
            artifact = write(Path(folder), architecture)
        loads(artifact)
        first_token(artifact)
        with load(artifact) as model:
            steps(model)


if __name__ == "__main__":
    main()
