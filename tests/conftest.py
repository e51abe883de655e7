"""Fixtures that every kind of test shares."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_models import GEMMA3, SMOLLM2


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


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-goldens`` rewrites the golden files instead of comparing with them; ``--kill-trials`` kills more."""
    parser.addoption("--update-goldens", action="store_true", help="rewrite golden files; review them with git diff")
    parser.addoption("--kill-trials", type=int, default=20, help="how often a rank of a run is killed")


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-goldens"))
