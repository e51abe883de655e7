"""The environment variables that Tapeout reads: all of them, typed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """``cache``: folder for fetched models and build results (``TAPEOUT_CACHE``, else ``~/.cache/tapeout``)."""

    cache: Path

    @classmethod
    def read(cls) -> Environment:
        """The variables as they stand now."""
        set_by_user = os.environ.get("TAPEOUT_CACHE")
        return cls(cache=Path(set_by_user).expanduser() if set_by_user else Path.home() / ".cache" / "tapeout")
