"""The pinned C compiler: where the ziglang package lies, and running it so that its caches are ours."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.runtime.errors import TapeoutError

_ERROR_LINES = 6


@dataclass(frozen=True)
class Zig:
    """An installed ziglang package."""

    version: str
    folder: Path

    def cc(self, arguments: Sequence[str], output: Path, *, scratch: Path, cwd: Path, failure: str) -> None:
        """Run ``zig cc`` and put its output in place whole. Raises TapeoutError, ``failure`` and zig's first lines."""
        partial = scratch / f"{output.name}.partial"
        environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": str(scratch), "ZIG_GLOBAL_CACHE_DIR": str(scratch)}
        command = [str(self.folder / "zig"), "cc", *arguments, "-o", str(partial)]
        result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        if result.returncode or not partial.exists():
            lines = [line.strip() for line in result.stderr.splitlines() if line.strip()][:_ERROR_LINES]
            raise TapeoutError(f"{failure}: {'; '.join(lines) or f'zig ended with {result.returncode}'}")
        os.replace(partial, output)


def find_zig() -> Zig:
    """The installed package. Raises TapeoutError without one."""
    place = importlib.util.find_spec("ziglang")
    if place is None or place.origin is None:
        raise TapeoutError(
            "compiling needs the ziglang package, which is not installed; pip install 'tapeout[compiler]'"
        )
    return Zig(importlib.metadata.version("ziglang"), Path(place.origin).parent)
