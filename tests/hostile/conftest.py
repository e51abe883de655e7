"""A sound checkpoint in both containers and its artifact, compiled once through the command line."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest
import small_model
from workspace import Workspace

from tapeout.compiler.cli import main


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace that nothing has broken, in a folder of its own; not to be changed."""
    workspace = Workspace(tmp_path_factory.mktemp("sound"))
    small_model.write_gguf(workspace.gguf)
    small_model.write_folder(workspace.folder, shards=2)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["compile", str(workspace.spec(workspace.gguf)), "-o", str(workspace.artifact), "--no-cache"]) == 0
    return workspace.root


@pytest.fixture
def workspace(sound: Path, tmp_path: Path) -> Workspace:
    """A copy of ``sound`` to break."""
    return Workspace(Path(shutil.copytree(sound, tmp_path / "work")))
