"""What the GPU benchmarks and checks need of a loaded model beside its public interface."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeout.runtime import load
from tapeout.runtime.backend import Rectangle

Floats = npt.NDArray[np.float32]

KEPT = ("step", "partial")  # buffers that live from one step to the next


def open_model(folder: Path, *, graphs: bool = True) -> Any:
    """A model on the GPU."""
    return load(folder, graphs=graphs)


def prompt(count: int, vocab: int, seed: int = 1) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


@contextmanager
def sequences(model: Any, count: int, tokens: int) -> Iterator[tuple[list[Any], list[int]]]:
    """``count`` sequences that hold ``tokens`` prompt tokens each, and the token that follows each."""
    held = [model.pool.open() for _ in range(count)]
    try:
        yield held, [model.prefill(each, prompt(tokens, model.vocab_size, 7 + i)) for i, each in enumerate(held)]
    finally:
        for each in held:
            model.pool.close(each)


def decode_list(model: Any, rows: int) -> Any:
    """The decode list that serves ``rows`` sequences."""
    return model.bucket("decode", rows)


def decoded_logits(model: Any, rows: int) -> Floats:
    """The logits that the last decode step left in the arena: float32 [rows, vocab]."""
    launch = next(each for each in decode_list(model, rows).plan if each["op"] == "sample")
    size = 4 * model.vocab_size
    raw = model.backend.read(launch["args"]["logits"], Rectangle(rows, size, size))
    return raw.view(np.float32).reshape(rows, model.vocab_size)


def poison(model: Any, rows: int) -> int:
    """Fill every buffer of a decode list with NaN, but for what lives between steps; returns the bytes."""
    graph = decode_list(model, rows).name
    buffers = [b for b in model.plan["memory"]["buffers"] if b["graph"] == graph and b["name"] not in KEPT]
    for buffer in buffers:
        if buffer["bytes"]:
            model.backend.poison(["arena", buffer["offset"]], Rectangle(1, buffer["bytes"], buffer["bytes"]))
    return sum(buffer["bytes"] for buffer in buffers)


def kv_digest(model: Any) -> int:
    """A checksum of the whole KV pool, for models whose pool is small."""
    size = model.plan["memory"]["kv_pool"]
    return hash(model.backend.read(["kv", 0], Rectangle(1, size, size)).tobytes())


class Replays:
    """Replays of a decode graph without the host in between: what the device alone takes for a step."""

    def __init__(self, model: Any) -> None:
        from cuda.bindings import driver

        self.cu, self.model = driver, model
        self.events = [self._made(driver.cuEventCreate(0)) for _ in range(2)]

    def _made(self, result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) > 1 else None

    def seconds(self, held: Sequence[Any], tokens: Sequence[int], steps: int) -> float:
        """Seconds a step over ``steps`` replays; the sequences may only be closed afterwards."""
        model, cu = self.model, self.cu
        for each in held:
            model.pool.grow(each, each.length + steps + 2)
        model.decode(held, tokens)
        launches, stream = decode_list(model, len(held)), model.backend._stream
        self._made(cu.cuEventRecord(self.events[0], stream))
        for _ in range(steps):
            self._made(cu.cuGraphLaunch(launches.graph, stream))
        self._made(cu.cuEventRecord(self.events[1], stream))
        self._made(cu.cuEventSynchronize(self.events[1]))
        model.backend._step.forget()
        model.backend._chain = []
        return float(self._made(cu.cuEventElapsedTime(*self.events))) / steps / 1e3


def median_seconds(run: Callable[[], Any], repeats: int = 5, warm: int = 1) -> float:
    """Median wall time of a call that waits for the device itself."""
    times: list[float] = []
    for index in range(warm + repeats):
        started = time.perf_counter()
        run()
        if index >= warm:
            times.append(time.perf_counter() - started)
    return statistics.median(times)
