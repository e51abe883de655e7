"""The two real models against transformers in float32 on the dequantized weights of the same files."""

from __future__ import annotations

import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_models import GEMMA3, SMOLLM2

from tapeout.compiler.checkpoints.source import resolve_source
from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import Model as ModelSection
from tapeout.compiler.spec import Quantization, Serving, Spec
from tapeout.compiler.verify.reference import quick_gguf
from tapeout.runtime import load

pytestmark = pytest.mark.models

SOURCES = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
POSITIONS = {"smollm2": 300, "gemma3": 600}  # beyond Gemma's window of 512
PROMPT = 32


def build(name: str, folder: Path, *, exact: bool) -> Path:
    """The compiled model, as its file has it or with all weights and the cache in float32."""
    serving = Serving(max_context=1024, kv_dtype="f32" if exact else "f16")
    quantization = Quantization(default="f32" if exact else "keep")
    spec = Spec(model=ModelSection(source=SOURCES[name]), quantization=quantization, serving=serving)
    compile_spec(spec, folder, cache=False)
    return folder


def reference(name: str) -> Any:
    """The transformers model in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    path = resolve_source(SOURCES[name], Path.cwd())
    with quick_gguf():
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def divergence(expected: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Of every position; a few at a time, since a vocabulary of 262,144 in float64 is 2 MB a position."""

    def some(start: int) -> np.ndarray:
        p, q = (log_softmax(logits[start : start + 8]) for logits in (expected, ours))
        return (np.exp(p) * (p - q)).sum(-1)

    return np.concatenate([some(start) for start in range(0, len(expected), 8)])


@pytest.mark.parametrize("name", SOURCES)
def test_a_real_model_is_near_transformers(name: str, tmp_path: Path) -> None:
    import torch

    model = reference(name)
    text = Path(str(pathlib.__file__)).read_text("utf-8")  # prose and code: a module of the standard library
    with load(build(name, tmp_path / "exact", exact=True)) as exact:
        ids = exact.tokenizer.encode(text)[: POSITIONS[name]]
        logits = exact.logits(ids)
        steps = [step.token for step in exact.generate(ids[:PROMPT], max_tokens=24)]
        ends = exact.eos_ids
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
        tokens = model.generate(torch.tensor([ids[:PROMPT]]), max_new_tokens=24, do_sample=False)[0, PROMPT:].tolist()
    assert divergence(expected, logits).max() <= 1e-6
    assert np.array_equal(logits.argmax(-1), expected.argmax(-1))
    assert steps == tokens[: len(steps)]
    assert len(steps) == 24 or steps[-1] in ends

    with load(build(name, tmp_path / "as it is", exact=False)) as quantized:
        logits = quantized.logits(ids)
    # llama.cpp on the same files: 7.0e-3 and 6.2e-3
    assert divergence(expected, logits).mean() <= 7e-3
    top = np.partition(expected, -2, axis=-1)
    sure = top[:, -1] - top[:, -2] > 1
    assert np.array_equal(logits.argmax(-1)[sure], expected.argmax(-1)[sure])
