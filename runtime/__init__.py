"""The lean runtime: opens an artifact and generates tokens. It imports nothing from the compiler."""

from __future__ import annotations

from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.model import Model, Step, load

__version__ = "0.1.0"

__all__ = ["Model", "Step", "TapeoutError", "__version__", "load"]
