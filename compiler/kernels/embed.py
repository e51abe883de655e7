"""Token embedding from a table in the tile16 layout (embed.c)."""

from __future__ import annotations

from tapeout.compiler.stages import KernelEntry


def kernel(format: str) -> KernelEntry:
    """The kernel for tables of a format."""
    return KernelEntry(f"embed_{format}", "embed", ("w", "y", "k", "scale"), "embed.c", (("TP_FORMAT", format),))
