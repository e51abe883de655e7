"""A folder with a checkpoint in both containers and its artifact, for tests to break."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import small_model


@dataclass(frozen=True)
class Workspace:
    """``gguf`` and ``folder`` are checkpoints, ``artifact`` is what ``gguf`` compiles to; a test may break them."""

    root: Path

    @property
    def gguf(self) -> Path:
        return self.root / "model.gguf"

    @property
    def folder(self) -> Path:
        return self.root / "model"

    @property
    def artifact(self) -> Path:
        return self.root / "artifact"

    def spec(self, source: Path, **sections: dict[str, object]) -> Path:
        return small_model.write_spec(self.root / "spec.yaml", source, **sections)
