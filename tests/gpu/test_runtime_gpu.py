"""The CUDA runtime on a real driver.

A toy model first, whose kernels (toy.cu) need nothing of the compiler; then every artifact that lies in
build/gpu/artifacts. On a machine where tapeout is not installed, lay links: `mkdir -p /tmp/tp/tapeout; ln -s
$PWD/runtime /tmp/tp/tapeout/runtime; PYTHONPATH=/tmp/tp python3 -m pytest -q tests/gpu/test_runtime_gpu.py`.
"""

from __future__ import annotations

import ctypes as C
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gpu
from gpu_toy import CONTEXT, ROOT, toy_cubin
from tiny_gpu import continuation

from tapeout.runtime import Model, TapeoutError, load
from tapeout.runtime.backend import Rectangle
from tapeout.runtime.cuda.driver import Driver, Where, bindings

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
ARTIFACTS = sorted(path.parent for path in (ROOT / "build" / "gpu" / "artifacts").glob("*/manifest.json"))
OVERHEAD = 96 << 20  # bytes of code, graphs and rounding beside what is planned
POSITIONS = 256
GIVEN_BACK = {
    "cuMemAlloc": "cuMemFree",
    "cuMemHostAlloc": "cuMemFreeHost",
    "cuStreamCreate": "cuStreamDestroy",
    "cuEventCreate": "cuEventDestroy",
    "cuModuleLoadData": "cuModuleUnload",
    "cuStreamEndCapture": "cuGraphDestroy",
    "cuGraphInstantiate": "cuGraphExecDestroy",
}


@pytest.fixture(scope="module")
def architecture() -> str:
    """What this GPU runs best."""
    return Driver(0).targets[0]


@pytest.fixture(scope="module")
def toy(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cubin = toy_cubin(architecture)
    folder = tmp_path_factory.mktemp("toy")
    return tiny_gpu.write_artifact(folder, (architecture,), cubin=lambda *_: cubin, context=CONTEXT)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver(0)
    driver.open()
    yield driver
    driver.close()


# ---- the wrapper -------------------------------------------------------------------------------------------------


def test_memory_goes_there_and_back(driver: Driver) -> None:
    nbytes = 3 << 20
    free = driver.memory()[0]
    pinned, device, stream, event = (
        driver.host_alloc(2 * nbytes),
        driver.alloc(nbytes, "x"),
        driver.stream(),
        driver.event(),
    )
    data = np.random.default_rng(0).bytes(nbytes)
    C.memmove(pinned, data, nbytes)
    driver.upload(device, pinned, nbytes, stream)
    driver.fill(device, 7, 256, stream)
    driver.fill_rows(device + 1024, 512, 0xFF, 16, 3, stream)
    driver.download(pinned + nbytes, device, nbytes, stream)
    driver.record(event, stream)
    driver.wait(event)
    expected = bytearray(data)
    expected[:256] = bytes([7]) * 256
    for row in range(3):
        expected[1024 + 512 * row : 1024 + 512 * row + 16] = b"\xff" * 16
    assert C.string_at(pinned + nbytes, nbytes) == expected
    assert device % 256 == 0 and free - driver.memory()[0] >= nbytes


@pytest.mark.parametrize("captured", [True, False])
def test_a_launch_gets_its_arguments(driver: Driver, architecture: str, captured: bool) -> None:
    module = driver.module(toy_cubin(architecture), "toy")
    function = driver.function(module, "tp_embed", 0, "embed")
    stream, pinned, device = driver.stream(), driver.host_alloc(4096), driver.alloc(4096, "x")
    C.memmove(pinned, np.arange(1024, dtype=np.int32).tobytes(), 4096)
    driver.upload(device, pinned, 4096, stream)
    values = [("ptr", device + 40), ("ptr", device + 2048), ("ptr", device + 20)]  # counts[0] is 5
    pdl = driver.capability >= (9, 0)
    bound = driver.bind(function, (3, 1, 1), 128, 0, pdl, values, stream, Where("test", 0, "embed", "embed"))
    if captured:
        driver.replay(driver.capture([bound], stream, "test"), stream, "test")
    else:
        driver.launch(bound)
    driver.download(pinned, device, 4096, stream)
    driver.synchronize(stream)
    out = np.frombuffer(C.string_at(pinned, 4096), np.float32)
    assert out[512:517].tolist() == [10, 11, 12, 13, 14]


def test_errors_name_the_call(driver: Driver) -> None:
    with pytest.raises(TapeoutError, match=r"cuMemAlloc failed for x of \d+ bytes on GPU 0 .*OUT_OF_MEMORY"):
        driver.alloc(1 << 50, "x")
    with pytest.raises(TapeoutError, match=r"cuModuleLoadData failed for kernel x on GPU 0"):
        driver.module(b"not a cubin" * 10, "x")


# ---- the toy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False])
def test_the_toy_follows_its_model(toy: Path, graphs: bool) -> None:
    with load(toy, graphs=graphs) as model:
        model.eos_ids = frozenset()
        for length in (1, 4, 5, 9, 17):
            prompt = (PROMPT * 2)[:length]
            assert [step.token for step in model.generate(prompt, max_tokens=300)] == continuation(prompt, 300)
        options: dict[str, Any] = {"temperature": 0.5, "seed": 9}
        found = [step.token for step in model.generate(PROMPT, max_tokens=40, **options)]
        assert found == continuation(PROMPT, 40, 0.5, 9)
        logits = model.logits(PROMPT)
        assert logits.argmax(1).tolist() == [continuation(PROMPT[: i + 1], 1)[0] for i in range(len(PROMPT))]


def test_sequences_side_by_side(toy: Path) -> None:
    with load(toy) as model:
        prompts = [PROMPT[:3], PROMPT[:7], PROMPT]
        sequences = [model.pool.open() for _ in prompts]
        first = [model.prefill(s, ids) for s, ids in zip(sequences, prompts, strict=True)]
        rows = list(model.stream(sequences, first, 100))
        for index, ids in enumerate(prompts):
            assert [first[index], *(row[index] for row in rows)] == continuation(ids, 101)


def test_tracing_the_toy(toy: Path) -> None:
    with load(toy) as model:
        for phase in ("prefill", "decode"):
            heads = [t.values for t in model.trace(PROMPT, phase) if t.op == "lm_head"]
            best = np.concatenate(heads).argmax(1).tolist()
            assert best == [tiny_gpu.next_token(PROMPT[: i + 1]) for i in range(len(PROMPT))]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """What the driver has made for this process and not taken back yet, by the call that gives it back.

    Unlike the device's free memory, it does not change with what other processes do.
    """
    driver, held = bindings(), Counter[tuple[str, int]]()

    def count(name: str, key: Callable[..., tuple[str, int]], step: int) -> None:
        call = getattr(driver, name)

        def counted(*args: Any) -> Any:
            result = call(*args)
            if result[0] == 0:
                held[key(args, result)] += step
            return result

        monkeypatch.setattr(driver, name, counted)

    for make, give in GIVEN_BACK.items():
        count(make, lambda _, result, give=give: (give, int(result[1])), 1)
        count(give, lambda args, _, give=give: (give, int(args[0])), -1)
    for name, step in (("cuDevicePrimaryCtxRetain", 1), ("cuDevicePrimaryCtxRelease", -1)):
        count(name, lambda args, _: ("cuDevicePrimaryCtxRelease", int(args[0])), step)
    return held


def test_everything_is_given_back(toy: Path, held: Counter[tuple[str, int]]) -> None:
    with load(toy) as model:
        next(model.generate(PROMPT))
        kinds = {give for (give, _), count in held.items() if count}
    assert {"cuMemFree", "cuModuleUnload", "cuGraphExecDestroy", "cuDevicePrimaryCtxRelease"} <= kinds
    assert not any(held.values()), +held


# ---- artifacts ---------------------------------------------------------------------------------------------------


def ids_of(model: Model, count: int) -> list[int]:
    return np.random.default_rng(3).integers(0, model.vocab_size, count).tolist()


def last_logits(model: Model) -> bytes:
    """What the last decode step of one row left as its logits."""
    launch = next(
        each
        for each in reversed(model.bucket("decode", 1).plan)
        if each.get("produces") and each["produces"][-1]["columns"][1] >= model.vocab_size
    )
    part = Rectangle(1, 4 * model.vocab_size, 4 * model.vocab_size)
    return model.backend.read(launch["args"][launch["output"]["arg"]], part).tobytes()


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda path: path.name)
def test_replay_equals_eager(artifact: Path) -> None:
    """Tokens and logits bit for bit, what every launch writes poisoned before each step."""
    found: list[tuple[list[int], list[int]]] = []
    for graphs in (True, False):
        with load(artifact, graphs=graphs) as model:
            sequence, digests = model.pool.open(), list[int]()
            tokens = [model.prefill(sequence, ids_of(model, 40))]
            for _ in range(min(POSITIONS, model.max_context - 41)):
                model.backend.poison_outputs()
                tokens += model.decode([sequence], [tokens[-1]])
                digests.append(hash(last_logits(model)))
            found.append((tokens, digests))
    assert found[0] == found[1]


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda path: path.name)
def test_a_stream_equals_single_steps(artifact: Path) -> None:
    with load(artifact) as model:
        ids = ids_of(model, 70)
        single, streamed = model.pool.open(), model.pool.open()
        tokens = [model.prefill(single, ids)]
        for _ in range(100):
            tokens += model.decode([single], [tokens[-1]])
        first = model.prefill(streamed, ids)
        assert [first, *(row[0] for row in model.stream([streamed], [first], 100))] == tokens


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda path: path.name)
def test_decoding_gives_the_logits_of_a_prefill(artifact: Path) -> None:
    """Not bit for bit: other kernels serve one row than many."""
    with load(artifact) as model:
        ids = ids_of(model, 60)
        whole = model.logits(ids)
        sequence = model.pool.open()
        for position, token in enumerate(ids):
            model.decode([sequence], [token])
            row = np.frombuffer(last_logits(model), np.float32)
            spread = float(whole[position].std())
            assert np.abs(row - whole[position]).max() <= 0.25 * spread, position


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda path: path.name)
def test_device_memory_is_the_plans(artifact: Path) -> None:
    with load(artifact) as model:
        held = model.device_memory()
        assert held is not None
        print(f"{artifact.name}: {held}, upload {model.backend.upload_s:.3f} s, load {model.load_s:.3f} s")
        assert held.planned == model.plan["memory"]["total"]
        assert 0 <= held.used - held.planned <= OVERHEAD
