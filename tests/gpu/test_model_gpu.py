"""Whole tiny models on a GPU against their references: prefill, decode, batches, replay against eager.

Runs on the artifacts that tests/gpu/tiny_models.py left in build/gpu/models; without any, it builds them first where
the compiler is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import FOLLOWED, MODELS, build

from tapeout.runtime import TapeoutError, load

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

PREBUILT = Path(__file__).parents[2] / "build" / "gpu" / "models"
REPLAYS = 272


@cache
def artifact(name: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a model and what it is expected to compute."""
    folder = PREBUILT / f"tiny-{name}"
    if not folder.exists():
        pytest.importorskip("pydantic", reason=f"{folder} is not there, and the compiler is not installed")
        PREBUILT.mkdir(parents=True, exist_ok=True)
        build(name, PREBUILT)
    with np.load(PREBUILT / f"tiny-{name}.npz") as found:
        return folder, dict(found)


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[None]:
    """Keep the device's context between the models, which would make it anew."""
    from tapeout.runtime.cuda.driver import Driver

    driver = Driver(0)
    driver.open()
    yield
    driver.close()


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def expected(name: str) -> dict[str, Any]:
    return artifact(name)[1]


@pytest.fixture
def model(name: str) -> Iterator[Any]:
    with load(artifact(name)[0]) as loaded:
        yield loaded


def worst(ours: np.ndarray, reference: np.ndarray) -> float:
    """The largest relative error of any row, infinite where a value is not finite."""
    if not np.isfinite(ours).all():
        return float("inf")
    difference = np.linalg.norm(ours.astype(np.float64) - reference, axis=-1)
    return float((difference / np.linalg.norm(reference.astype(np.float64), axis=-1)).max())


def test_prefill_is_the_reference(name: str, model: Any, expected: dict[str, Any]) -> None:
    assert worst(model.logits(expected["ids"]), expected["logits"]) <= MODELS[name].tolerance


def test_decode_is_the_reference(name: str, model: Any, expected: dict[str, Any]) -> None:
    """Token by token from an empty cache, the outputs of the step before poisoned."""
    from gpu_engine import decoded_logits, poison

    sequence, rows = model.pool.open(), []
    for token in expected["ids"]:
        poison(model, 1)
        model.decode([sequence], [int(token)])
        rows.append(decoded_logits(model, 1)[0])
    assert worst(np.stack(rows), expected["logits"]) <= MODELS[name].tolerance


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_a_batch_is_the_reference(name: str, model: Any, expected: dict[str, Any], count: int) -> None:
    """Sequences of unlike lengths, each continued with given tokens; also where a bucket is not full."""
    from gpu_engine import decoded_logits, poison

    starts, batch = expected["starts"][-count:], expected["batch"][-count:].tolist()
    held = [model.pool.open() for _ in starts]
    for sequence, start, row in zip(held, starts, batch, strict=True):
        model.prefill(sequence, row[:start])
    errors = []
    for step in range(FOLLOWED):
        poison(model, count)
        model.decode(held, [row[start + step] for start, row in zip(starts, batch, strict=True)])
        found = decoded_logits(model, count)
        errors.append(worst(found, expected["batch_logits"][-count:, step + 1]))
    assert max(errors) <= MODELS[name].tolerance


def test_greedy_tokens_are_the_best(model: Any, expected: dict[str, Any]) -> None:
    """What a step chooses is the largest of its own logits, on the device and after the host's look."""
    from gpu_engine import decoded_logits

    sequence = model.pool.open()
    token = model.prefill(sequence, expected["ids"][:40].tolist())
    assert token == int(model.logits(expected["ids"][:40])[-1].argmax())
    sequence = model.pool.open()
    model.prefill(sequence, expected["ids"][:40].tolist())
    for _ in range(20):
        [token] = model.decode([sequence], [token])
        assert token == int(decoded_logits(model, 1)[0].argmax())


@pytest.mark.parametrize("rows", [1, 8])
def test_replay_is_eager(name: str, rows: int) -> None:
    """Bit for bit over more than 256 positions, everything that a step writes poisoned before each replay."""
    from gpu_checks import replay_is_eager

    assert replay_is_eager(artifact(name)[0], rows, REPLAYS) == []


def test_every_launch_writes_its_output(model: Any, expected: dict[str, Any]) -> None:
    """Launch by launch with outputs poisoned before each, in prefill and in decode."""
    for phase, count in (("prefill", 70), ("decode", 3)):
        for traced in model.trace(expected["ids"][:count].tolist(), phase):
            assert np.isfinite(traced.values).all(), (phase, traced.graph, traced.index, traced.op)


def test_sampling_repeats_with_its_seed(model: Any, expected: dict[str, Any]) -> None:
    ids = expected["ids"][:10].tolist()

    def drawn(seed: int) -> list[int]:
        options = {"max_tokens": 24, "temperature": 30.0, "top_k": 50, "top_p": 0.95}
        return [step.token for step in model.generate(ids, seed=seed, **options)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_memory_is_what_the_plan_says(model: Any) -> None:
    """Beside the plan there is code and graphs, which take a bounded constant."""
    held = model.device_memory()
    assert held.planned <= held.used + (4 << 20)
    assert held.used - held.planned <= 64 << 20


def test_generation_ends_in_one_sentence_beyond_the_context(model: Any, expected: dict[str, Any]) -> None:
    ids = np.resize(expected["ids"], model.max_context + 1).tolist()
    with pytest.raises(TapeoutError, match="planned for a context of 512"):
        model.generate(ids)
