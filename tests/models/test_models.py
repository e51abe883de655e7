"""The two real models against transformers in float32 on the dequantized weights of the same files."""

from __future__ import annotations

import pathlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_models import GEMMA3, SMOLLM2

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import Model as ModelSection
from tapeout.compiler.spec import Quantization, Serving, Spec
from tapeout.runtime import load

pytestmark = pytest.mark.models

SOURCES = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
POSITIONS = {"smollm2": 300, "gemma3": 600}  # beyond Gemma's window of 512


@cache
def sample(name: str) -> list[int]:
    """Token ids of English prose and code: the source of a module of the standard library."""
    with load(artifact(name)) as model:
        text = Path(str(pathlib.__file__)).read_text("utf-8")
        return model.tokenizer.encode(text)[: POSITIONS[name]]


_FOLDERS: dict[str, Path] = {}


def artifact(name: str, *, exact: bool = False) -> Path:
    """The compiled model, as its file has it or with all weights and the cache in float32."""
    return _FOLDERS[f"{name}-exact" if exact else name]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, source in SOURCES.items():
        for exact in (False, True):
            key = f"{name}-exact" if exact else name
            serving = Serving(max_context=1024, kv_dtype="f32" if exact else "f16")
            quantization = Quantization(default="f32" if exact else "keep")
            spec = Spec(model=ModelSection(source=source), quantization=quantization, serving=serving)
            _FOLDERS[key] = tmp_path_factory.mktemp("artifacts") / key
            compile_spec(spec, _FOLDERS[key], cache=False)


@cache
def reference(name: str) -> tuple[Any, np.ndarray]:
    """The transformers model in float32 and its logits of the sample."""
    import torch
    from transformers import AutoModelForCausalLM

    from tapeout.compiler.checkpoints.source import resolve_source

    path = resolve_source(SOURCES[name], Path.cwd())
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model, model(torch.tensor([sample(name)])).logits[0].numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def divergence(expected: np.ndarray, ours: np.ndarray) -> np.ndarray:
    p, q = log_softmax(expected), log_softmax(ours)
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.mark.parametrize("name", SOURCES)
def test_the_float32_path_is_transformers(name: str) -> None:
    model, expected = reference(name)
    with load(artifact(name, exact=True)) as ours:
        logits = ours.logits(sample(name))
        assert divergence(expected, logits).max() <= 1e-6
        assert np.array_equal(logits.argmax(-1), expected.argmax(-1))
        prompt = sample(name)[:32]
        steps = [step.token for step in ours.generate(prompt, max_tokens=24)]
        ends = ours.eos_ids
    import torch

    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, 32:].tolist()
    assert steps == tokens[: len(steps)]
    assert len(steps) == 24 or steps[-1] in ends


@pytest.mark.parametrize("name", SOURCES)
def test_the_quantized_path_stays_near_float32(name: str) -> None:
    _, expected = reference(name)
    with load(artifact(name)) as ours:
        logits = ours.logits(sample(name))
    # llama.cpp on the same files: 7.0e-3 and 6.2e-3
    assert divergence(expected, logits).mean() <= 7e-3
    top = np.sort(expected, axis=-1)
    sure = top[:, -1] - top[:, -2] > 1
    assert np.array_equal(logits.argmax(-1)[sure], expected.argmax(-1)[sure])
